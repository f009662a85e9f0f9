//! Tools and reasoning: the events that a caller gets, deaths in the middle of
//! a call, and refusals.

use std::fs;

use bursar::{
    Chat, ChatError, ChatEvent, FinishReason, Hint, LoadOptions, ModelHandle, ModelSource, OutputFormat,
    ReasoningFormat, ReplyFormat, ToolCall, ToolCallEvent, ToolChoice, ToolError, ToolFormat,
};
use serde_json::{Value, json};

use crate::stage::{Folder, Stage, ask, device, runtime_on, small, small_envelope, story, text};

/// A reply: its end and its events. Log-probabilities and ids are left out, and adjacent pieces of
/// one kind are joined.
#[derive(Clone, Debug, PartialEq)]
struct ReadReply {
    events: Vec<String>,
    scored: usize,
    text: String,
    reasoning: String,
    calls: Vec<ToolCall>,
    finish_reason: FinishReason,
    tokens: usize,
    reasoned: usize,
}

/// Reads a reply. Calls `meanwhile` after each event.
async fn read_reply(
    model: &ModelHandle,
    chat: Chat,
    mut meanwhile: impl FnMut(&ChatEvent),
) -> Result<ReadReply, ChatError> {
    let mut reply = model.chat(chat).await?;
    let (mut events, mut scored, mut last) = (Vec::<String>::new(), 0, None);
    while let Some(event) = reply.next().await {
        let event = event?;
        meanwhile(&event);
        let (kind, more) = match &event {
            ChatEvent::Text(more) => ("text ".to_owned(), more.clone()),
            ChatEvent::Reasoning(more) => ("reasoning ".to_owned(), more.clone()),
            ChatEvent::ToolCall(ToolCallEvent::Begin { index, name, .. }) => (format!("begin {index} "), name.clone()),
            ChatEvent::ToolCall(ToolCallEvent::Arguments { index, json }) => {
                (format!("arguments {index} "), json.clone())
            }
            ChatEvent::ToolCall(ToolCallEvent::End { index, is_whole }) => {
                (format!("end {index} "), is_whole.to_string())
            }
            ChatEvent::Token(_) => {
                scored += 1;
                continue;
            }
            ChatEvent::Done { text, reasoning, tool_calls, finish_reason, usage, .. } => {
                let (text, reasoning, calls) = (text.clone(), reasoning.clone(), tool_calls.clone());
                let (finish_reason, tokens) = (*finish_reason, usage.completion_tokens);
                let reasoned = usage.reasoning_tokens;
                last = Some(ReadReply {
                    events: Vec::new(),
                    scored,
                    text,
                    reasoning,
                    calls,
                    finish_reason,
                    tokens,
                    reasoned,
                });
                continue;
            }
            other => panic!("an event that this test does not expect: {other:?}"),
        };
        match events.last_mut().filter(|last| last.starts_with(&kind)) {
            Some(last) => *last += &more,
            None => events.push(kind + &more),
        }
    }
    let reply = last.expect("a reply has an end");
    let of = |kind: &str| events.iter().filter_map(|event| event.strip_prefix(kind)).collect::<String>();
    assert_eq!((of("text "), of("reasoning ")), (reply.text.clone(), reply.reasoning.clone()));
    for (index, call) in reply.calls.iter().enumerate() {
        assert_eq!(of(&format!("begin {index} ")), call.name);
        assert_eq!(of(&format!("arguments {index} ")), call.arguments);
        assert_eq!(of(&format!("end {index} ")), call.is_whole.to_string());
    }
    Ok(ReadReply { events, ..reply })
}

fn weather() -> Value {
    json!({"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Bern", "Zug"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"], "additionalProperties": false,
    }}})
}

fn clock() -> Value {
    json!({"name": "clock"})
}

pub fn ample() -> LoadOptions {
    LoadOptions {
        kv_tokens: Some(2048),
        envelope: Some(bursar::Envelope { context_tokens: 900, ..small_envelope() }),
        ..small()
    }
}

fn about() -> Chat {
    text("What is the weather?").tools([weather(), clock()]).max_tokens(500)
}

/// A chat whose reply is exactly `script`. The chat has tools, so the grammar would allow a tool
/// call in place of the script. A penalty on the first character of a call prevents such a call.
async fn scripted(model: &ModelHandle, chat: Chat, script: &str) -> Chat {
    let context = model.serving().await.expect("the model serves").context;
    let tokenizer = context.prompts.tokenizer();
    let mut chat = chat.format(OutputFormat::Choice(vec![script.to_owned()]));
    for id in 0..tokenizer.vocabulary_size() as u32 {
        if tokenizer.token_of(id).is_some_and(|token| token.starts_with('<')) {
            chat = chat.logit_bias(id, -100.0);
        }
    }
    chat
}

const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\", \"days\": 2}}\n</tool_call>";

#[test]
fn a_forced_call_follows_the_tools_schema() {
    story(async {
        let stage = Stage::set(ample()).await;
        for seed in 0..4 {
            let chat = about().temperature(2.0).seed(seed).parallel_tool_calls(false).log_probabilities(1);
            let reply =
                read_reply(&stage.model, chat.tool_choice(ToolChoice::Required), |_| {}).await.expect("an answer");
            assert_eq!(reply.finish_reason, FinishReason::ToolCalls);
            assert_eq!((reply.text.as_str(), reply.reasoning.as_str(), reply.scored), ("", "", reply.tokens));
            let [call] = &reply.calls[..] else { panic!("{:?}", reply.calls) };
            assert!(
                ["weather", "clock"].contains(&call.name.as_str()) && call.is_whole && call.id.starts_with("call_")
            );
        }
        let named = |name: &str| about().tool_choice(ToolChoice::Named(name.to_owned()));
        let answered = read_reply(&stage.model, named("weather"), |_| {}).await.expect("the model answers");
        let arguments = answered.calls[0].parsed().expect("an object");
        assert!(arguments["place"].is_string() && (1..=9).contains(&arguments["days"].as_u64().expect("a number")));
        let reply = read_reply(&stage.model, named("clock"), |_| {}).await.expect("the model answers");
        assert_eq!((reply.calls[0].name.as_str(), reply.calls[0].arguments.as_str()), ("clock", "{}"));
        // The next turn contains the call and its result.
        let next = about().tool_call(reply.calls[0].clone()).tool_result(&reply.calls[0].id, "12:00").max_tokens(4);
        assert!(ask(&stage.model, next).await.expect("the model answers").usage.prompt_tokens > 100);
    });
}

#[test]
fn calls_and_text_are_streamed_in_order() {
    story(async {
        let stage = Stage::set(ample()).await;
        let script = format!("Let me see.\n{CALL}\nAnd then:\n\n{CALL}\n{CALL}\nDone.");
        let chat = scripted(&stage.model, about(), &script).await;
        let answered = read_reply(&stage.model, chat.clone(), |_| {}).await.expect("the model answers");
        let arguments = "{\"place\": \"Bern\", \"days\": 2}";
        let call = |index: usize| {
            [format!("begin {index} weather"), format!("arguments {index} {arguments}"), format!("end {index} true")]
        };
        let [first, second, third] = [0, 1, 2].map(call);
        let texts = ["text Let me see.", "text \nAnd then:", "text \nDone."].map(|text| vec![text.to_owned()]);
        let [before, between, after] = texts;
        let expected = [&before[..], &first, &between, &second, &third, &after].concat();
        assert_eq!((&answered.events, answered.finish_reason), (&expected, FinishReason::ToolCalls));
        assert_eq!(answered.text, "Let me see.\nAnd then:\nDone.");
        // The reply ends with the first call.
        let one =
            read_reply(&stage.model, chat.clone().parallel_tool_calls(false), |_| {}).await.expect("the model answers");
        assert_eq!((&one.events[..], one.finish_reason), (&expected[..4], FinishReason::ToolCalls));
        assert!(one.tokens < answered.tokens);
        // A call that is not valid does not count as the requested call.
        let broken = CALL.replace("\"days\": 2", "\"days\": ,");
        let chat_of = scripted(&stage.model, about(), &format!("{broken}\nOnce more:\n{CALL}\nDone.")).await;
        let again =
            read_reply(&stage.model, chat_of.parallel_tool_calls(false), |_| {}).await.expect("the model answers");
        assert_eq!(again.calls.iter().map(|call| call.is_whole).collect::<Vec<_>>(), [false, true]);
        assert_eq!((again.text.trim(), again.finish_reason), ("Once more:", FinishReason::ToolCalls));
        // Stop strings and limits apply to the raw text that the model generates.
        let stopped =
            read_reply(&stage.model, chat.clone().stop("\", \"days"), |_| {}).await.expect("the model answers");
        assert_eq!(stopped.calls[0].arguments, "{\"place\": \"Bern");
        assert_eq!((stopped.calls[0].is_whole, stopped.finish_reason), (false, FinishReason::Stop));
        let cut =
            read_reply(&stage.model, chat.clone().max_tokens(answered.tokens - 1), |_| {}).await.expect("an answer");
        assert_eq!((cut.calls.len(), cut.finish_reason), (3, FinishReason::Length));
        // Without reply formats, everything is text.
        let plain =
            read_reply(&stage.model, chat.reply_format(ReplyFormat::default()), |_| {}).await.expect("an answer");
        assert_eq!((plain.text, plain.calls, plain.finish_reason), (script, Vec::new(), FinishReason::Stop));
    });
}

#[test]
fn no_event_is_repeated_when_actors_die_during_a_call() {
    story(async {
        let stage = Stage::set(ample()).await;
        let chat = scripted(&stage.model, about(), &format!("Let me see.\n{CALL}\n{CALL}\nDone.")).await;
        let undisturbed = read_reply(&stage.model, chat.clone(), |_| {}).await.expect("the model answers");
        for (moment, occurrence) in [("begin", 0), ("arguments", 2), ("end", 0)] {
            let victim = stage.model.serving().await.expect("the model serves").scheduler;
            let mut seen = 0;
            let answered = read_reply(&stage.model, chat.clone(), |event| {
                let is_moment = matches!(
                    (moment, event),
                    ("begin", ChatEvent::ToolCall(ToolCallEvent::Begin { .. }))
                        | ("arguments", ChatEvent::ToolCall(ToolCallEvent::Arguments { .. }))
                        | ("end", ChatEvent::ToolCall(ToolCallEvent::End { .. }))
                );
                if is_moment && seen == occurrence {
                    victim.kill();
                }
                seen += usize::from(is_moment);
            });
            let answered = answered.await.expect("the reply goes on");
            assert!(seen > occurrence, "the scheduler was killed during the reply");
            assert_eq!(answered.events, undisturbed.events, "{moment}");
            assert_eq!((answered.tokens, answered.finish_reason), (undisturbed.tokens, undisturbed.finish_reason));
        }
    });
}

/// A folder with the demo model and another template.
pub fn folder_with_template(template: &str) -> Folder {
    let folder = Folder::empty();
    let demo = bursar_golden::demo_checkpoint();
    for entry in fs::read_dir(demo).expect("the demo's checkpoint").flatten() {
        fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
    }
    fs::write(folder.path().join("chat_template.jinja"), template).expect("it is written");
    folder
}

/// The demo model with another template.
async fn with_template(runtime: &bursar::Runtime, template: &str) -> (Folder, ModelHandle) {
    let folder = folder_with_template(template);
    let model = runtime.load_with(ModelSource::folder(folder.path()), ample(), |_| {}).await.expect("it starts");
    (folder, model)
}

const THINKING: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}\
{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}\
{{ '<|im_start|>assistant\n<think>\n' }}{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}";

#[test]
fn reasoning_is_separated_if_the_template_supports_thinking() {
    story(async {
        let runtime = runtime_on(&device()).await;
        let (_folder, model) = with_template(&runtime, THINKING).await;
        // A chat with a format cannot end at once, because the format must still follow. The format
        // itself applies only after the reasoning, which this model never closes.
        let one = OutputFormat::Choice(vec!["1".into()]);
        let chat = text("Hm?").temperature(2.0).seed(1).max_tokens(12).format(one).log_probabilities(0);
        let thinking = read_reply(&model, chat.clone(), |_| {}).await.expect("the model answers");
        assert_eq!((thinking.text.as_str(), thinking.finish_reason), ("", FinishReason::Length));
        assert_eq!((!thinking.reasoning.trim().is_empty(), thinking.scored), (true, 12), "{thinking:?}");
        assert_eq!(thinking.reasoned, 12, "every token is reasoning");
        // A template with `enable_thinking` set to false closes the reasoning.
        let off = chat.clone().template_variable("enable_thinking", false);
        // A caller may want the raw text, in which the format applies from the beginning.
        let raw = ReplyFormat { tools: ToolFormat::None, reasoning: ReasoningFormat::None };
        for chat in [off, chat.clone().reply_format(raw)] {
            let reply = read_reply(&model, chat, |_| {}).await.expect("the model answers");
            assert_eq!((reply.text.as_str(), reply.reasoning.as_str(), reply.reasoned), ("1", "", 0));
        }
        let refused = model.chat(chat.clone().ignore_end()).await.expect_err("a format needs an end");
        assert!(matches!(refused, ChatError::FormatWithoutEnd), "{refused}");
        // Continued reasoning is still reasoning, and continued text is still text.
        let more = read_reply(&model, chat.clone().reasoning("Two and").continue_final_message(), |_| {}).await;
        let more = more.expect("the reply goes on");
        assert_eq!((more.text.as_str(), more.reasoned, more.reasoning.is_empty()), ("", 12, false), "{more:?}");
        let answered =
            read_reply(&model, chat.clone().assistant("The").reasoning("So.").continue_final_message(), |_| {}).await;
        assert_eq!(answered.expect("the reply goes on").text, "1");
        // Reasoning of earlier turns reaches the template.
        let turn = |chat: Chat| chat.user("Sure?").max_tokens(1);
        let without = ask_prompt(&model, turn(text("Hm?").assistant("4"))).await;
        let with = ask_prompt(&model, turn(text("Hm?").assistant("4").reasoning("Two and two."))).await;
        assert!(with > without + 5, "{with} {without}");
    });
}

/// The number of tokens in a chat's prompt.
async fn ask_prompt(model: &ModelHandle, chat: Chat) -> usize {
    let mut reply = model.chat(chat).await.expect("the model answers");
    loop {
        if let ChatEvent::Done { usage, .. } = reply.next().await.expect("the reply goes on").expect("without error") {
            return usage.prompt_tokens;
        }
    }
}

#[test]
fn tool_choice_none_hides_tools_and_keeps_calls_as_text() {
    story(async {
        let stage = Stage::set(ample()).await;
        let blank = ask_prompt(&stage.model, text("What is the weather?").max_tokens(1)).await;
        let hidden = about().tool_choice(ToolChoice::None);
        assert_eq!(ask_prompt(&stage.model, hidden.clone().max_tokens(1)).await, blank);
        let chat = hidden.format(OutputFormat::Choice(vec![CALL.to_owned()]));
        let reply = read_reply(&stage.model, chat, |_| {}).await.expect("the model answers");
        assert_eq!((reply.text.as_str(), reply.finish_reason), (CALL, FinishReason::Stop));
    });
}

#[test]
fn tools_that_cannot_be_called_are_refused_by_name() {
    story(async {
        let stage = Stage::set(ample()).await;
        let refused = async |chat: Chat| stage.model.chat(chat).await.expect_err("the request is refused");
        let required = || about().tool_choice(ToolChoice::Required);
        let none = refused(text("Hm?").tool_choice(ToolChoice::Required)).await;
        assert!(matches!(none, ChatError::Tools(ToolError::NoTools)), "{none}");
        let unknown = refused(about().tool_choice(ToolChoice::Named("wether".into()))).await;
        assert!(matches!(unknown, ChatError::Tools(ToolError::UnknownTool { tools: 2 })), "{unknown}");
        let shapeless = refused(required().tools([json!({"type": "function", "function": {"parameters": {}}})])).await;
        assert!(matches!(shapeless, ChatError::Tools(ToolError::Shape { index: 2 })), "{shapeless}");
        let fault = json!({"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "zebra"}}}});
        let schema = refused(required().tools([fault.clone()])).await;
        assert!(matches!(schema, ChatError::Tools(ToolError::Schema { index: 2, .. })), "{schema}");
        assert!(schema.reason().is_some_and(|reason| reason.contains("/properties/a")), "{schema:?}");
        // If a tool is named, only the schema of that tool is checked.
        let named = about().tools([fault]).tool_choice(ToolChoice::Named("clock".into()));
        assert_eq!(read_reply(&stage.model, named, |_| {}).await.expect("the model answers").calls.len(), 1);
        let no_format = refused(required().reply_format(ReplyFormat::default())).await;
        assert!(matches!(no_format, ChatError::Tools(ToolError::NoFormat)), "{no_format}");
        let gemma = ReplyFormat { tools: ToolFormat::Gemma4, reasoning: ReasoningFormat::ThoughtChannel };
        let not_forced = refused(required().reply_format(gemma)).await;
        assert!(matches!(not_forced, ChatError::Tools(ToolError::ForcingUnsupported)), "{not_forced}");
        let either = refused(about().reply_format(gemma).format(OutputFormat::Choice(vec!["a".into()]))).await;
        assert!(matches!(either, ChatError::Tools(ToolError::ForcingUnsupported)), "{either}");
        let formed = refused(required().format(OutputFormat::json(json!({"type": "zebra"})))).await;
        assert!(matches!(formed, ChatError::Tools(ToolError::WithFormat)), "{formed}");
        let endless = refused(required().ignore_end()).await;
        assert!(matches!(endless, ChatError::FormatWithoutEnd), "{endless}");
        let (_folder, blind) = with_template(&stage.runtime, THINKING).await;
        for error in [none, unknown, shapeless, schema, no_format, not_forced, either, formed, endless] {
            assert!(!error.hint().is_empty() && error.kind() == bursar::ErrorKind::Request);
        }
        // The template of this model does not render tools, so they are described
        // in the system message.
        let about = || about().template_variable("enable_thinking", false);
        let required = || about().tool_choice(ToolChoice::Required);
        let prompt = blind.prompt_of(about()).await.expect("a prompt");
        let shown = blind.detokenize(prompt.token_ids).await.expect("the prompt's text");
        assert!(shown.contains("<tools>\n{\"type\":\"function\"") && shown.contains("\"clock\""), "{shown}");
        let called =
            read_reply(&blind, required().parallel_tool_calls(false), |_| {}).await.expect("the model answers");
        assert!(called.calls.len() == 1 && called.calls[0].is_whole, "{:?}", called.calls);
        let next = about().tool_call(called.calls[0].clone()).tool_result(&called.calls[0].id, "12:00");
        let shown = blind.prompt_of(next).await.expect("a prompt").token_ids;
        let shown = blind.detokenize(shown).await.expect("the prompt's text");
        assert!(shown.contains("<tool_call>\n{") && shown.contains("<tool_response>\n12:00\n"), "{shown}");
        // A caller that describes the tools in words can set the format of the calls.
        let hermes = ReplyFormat { tools: ToolFormat::Hermes, ..ReplyFormat::default() };
        let request = about().reply_format(hermes).tool_choice(ToolChoice::Required).parallel_tool_calls(false);
        assert_eq!(read_reply(&blind, request, |_| {}).await.expect("the model answers").calls.len(), 1);
    });
}
