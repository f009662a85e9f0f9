//! Descriptions of tools in the system message, with calls and results as text, for templates that
//! do not show tools.
//!
//! The description and the call format are the same as in Hermes 2 Pro (Nous Research), on which
//! Qwen2.5's template is modeled. Models that were trained on either format follow it, and other
//! models get an example.

use serde_json::{Value, json};

use super::message::{ContentPart, Message, Role};

/// Rewrites messages. The system message describes `tools`, calls become `<tool_call>` in the
/// model's text, and results become `<tool_response>` in user turns. Consecutive results share one
/// turn. If there are no tools, only calls and results change.
pub fn describe_tools(messages: &[Message], tools: &[Value]) -> Vec<Message> {
    let description = description(tools);
    let mut described: Vec<Message> = Vec::with_capacity(messages.len() + 1);
    for message in messages {
        match message.role {
            Role::Tool => match described.last_mut().filter(|last| is_of_results(last)) {
                Some(results) => results.content.push(ContentPart::Text(format!("\n{}", response(message)))),
                None => described.push(Message::text(Role::User, response(message))),
            },
            _ => described.push(Message { role: message.role, content: content_of(message) }),
        }
    }
    if tools.is_empty() {
        return described;
    }
    match described.first_mut().filter(|first| first.role == Role::System) {
        Some(system) => system.content.push(ContentPart::Text(format!("\n\n{description}"))),
        None => described.insert(0, Message::text(Role::System, description)),
    }
    described
}

fn description(tools: &[Value]) -> String {
    let tools: Vec<String> = tools.iter().map(Value::to_string).collect();
    format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
         signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json \
         object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": \
         <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
        tools.join("\n")
    )
}

const RESPONSE: &str = "<tool_response>\n";

fn response(message: &Message) -> String {
    format!("{RESPONSE}{}\n</tool_response>", message.texts().collect::<String>())
}

/// Whether the message is a user turn that was made from tool results.
fn is_of_results(message: &Message) -> bool {
    message.role == Role::User && message.texts().next().is_some_and(|text| text.starts_with(RESPONSE))
}

/// The parts of a message, with calls converted to text.
fn content_of(message: &Message) -> Vec<ContentPart> {
    let mut is_first = !message.texts().any(|text| !text.is_empty());
    let parts = message.content.iter().map(|part| match part {
        ContentPart::ToolCall(call) => {
            let function = call.get("function").unwrap_or(call);
            let function = json!({"name": function["name"], "arguments": function["arguments"]});
            let line_break = if std::mem::take(&mut is_first) { "" } else { "\n" };
            ContentPart::Text(format!("{line_break}<tool_call>\n{function}\n</tool_call>"))
        }
        part => part.clone(),
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_extend_the_system_message_and_results_become_user_turns() {
        let tool = json!({"type": "function", "function": {"name": "clock"}});
        let call = |zone: &str| {
            ContentPart::ToolCall(
                json!({"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": zone}}}),
            )
        };
        let result = |text: &str| Message {
            role: Role::Tool,
            content: vec![ContentPart::ResultOf("1".to_owned()), ContentPart::Text(text.to_owned())],
        };
        let messages = [
            Message::text(Role::System, "Be brief."),
            Message::text(Role::User, "What time is it?"),
            Message { role: Role::Assistant, content: vec![call("a"), call("b")] },
            result("1:00"),
            result("2:00"),
            Message::text(Role::User, "Thanks"),
        ];
        let described = describe_tools(&messages, std::slice::from_ref(&tool));
        let texts: Vec<(Role, String)> =
            described.iter().map(|message| (message.role, message.texts().collect())).collect();
        assert!(
            texts[0].1.starts_with("Be brief.\n\n# Tools\n") && texts[0].1.contains(&tool.to_string()),
            "{texts:?}"
        );
        let called = "<tool_call>\n{\"name\":\"clock\",\"arguments\":{\"zone\":\"a\"}}\n</tool_call>\n<tool_call>\n";
        assert!(texts[2].1.starts_with(called), "{texts:?}");
        let results = "<tool_response>\n1:00\n</tool_response>\n<tool_response>\n2:00\n</tool_response>";
        assert_eq!(texts[3], (Role::User, results.to_owned()));
        assert_eq!(texts[4], (Role::User, "Thanks".to_owned()));
        assert_eq!(describe_tools(&messages[1..2], &[tool])[0].role, Role::System);
    }
}
