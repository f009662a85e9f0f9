//! A tool: the model must call it, its arguments arrive in pieces, and its result is part
//! of the next turn.
//!
//! The demo model was not trained to call tools. A forced call is still valid, because only tokens
//! that the call format and the tool's schema allow can be sampled.
//!
//! `cargo run --release --example 11_call_a_tool`

use bursar::{
    Chat, ChatEvent, Envelope, FinishReason, LoadOptions, ModelSource, Runtime, RuntimeConfig, ToolCallEvent,
    ToolChoice,
};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    // Descriptions of tools and their calls take up part of the context.
    let envelope = Some(Envelope { context_tokens: 1024, ..Envelope::small() });
    let options = LoadOptions { envelope, ..LoadOptions::small() };
    let model = runtime.load_with(ModelSource::demo(), options, |_| {}).await?;

    let weather = json!({
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a town",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": { "enum": ["Bern", "Chur", "Zug"] },
                    "days": { "type": "integer", "minimum": 1, "maximum": 7 },
                },
                "required": ["town", "days"],
                "additionalProperties": false,
            },
        },
    });
    let chat = Chat::new().user("What is the weather?").tools([weather]);

    println!("The model has to call a tool:");
    let mut reply = model.chat(chat.clone().tool_choice(ToolChoice::Required).parallel_tool_calls(false)).await?;
    let mut calls = Vec::new();
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::ToolCall(ToolCallEvent::Begin { index, id, name }) => println!("call {index} ({id}): {name}"),
            ChatEvent::ToolCall(ToolCallEvent::Arguments { json, .. }) => println!("  {json:?}"),
            ChatEvent::ToolCall(ToolCallEvent::End { is_whole, .. }) => println!("whole: {is_whole}"),
            ChatEvent::Done { tool_calls, finish_reason, text, .. } => {
                if finish_reason != FinishReason::ToolCalls || !text.is_empty() {
                    return Err(format!("the reply ended with {finish_reason:?} after {text:?}").into());
                }
                calls = tool_calls;
            }
            _ => {}
        }
    }
    let [call] = &calls[..] else { return Err(format!("the reply has {} calls, not 1", calls.len()).into()) };
    let arguments = Value::Object(call.parsed().ok_or("the arguments are not an object")?);
    let (town, days) = (arguments["town"].as_str().ok_or("a town")?, arguments["days"].as_u64().ok_or("days")?);
    if !["Bern", "Chur", "Zug"].contains(&town) || !(1..=7).contains(&days) {
        return Err(format!("{arguments} does not follow the schema").into());
    }

    println!("\nThe tool returns its result, and the model answers in words:");
    let result = json!({ "town": town, "celsius": vec![21; days as usize] });
    let answered = chat.tool_call(call.clone()).tool_result(&call.id, result.to_string()).tool_choice(ToolChoice::None);
    println!("> {}", model.chat(answered.max_tokens(24)).await?.text().await?);
    runtime.shutdown().await;
    Ok(())
}
