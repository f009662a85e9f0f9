//! The parts of a reply so far, and the events that report them.

use bursar_model::text::ReplyPart;

use super::{ChatEvent, ToolCall, ToolCallEvent};
use crate::chat::preparation::any_number;

/// Collects the parts of one reply.
#[derive(Default)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<ToolCall>,
    /// Prefix of the ids of this reply's calls. No other reply has the same prefix.
    ids: String,
}

impl Answer {
    pub(super) fn new() -> Self {
        let ids = format!("call_{:016x}{:08x}", any_number(), any_number() as u32);
        Answer { ids, ..Answer::default() }
    }

    /// Adds a part. Returns the events that report it.
    pub(super) fn take(&mut self, part: ReplyPart) -> Vec<ChatEvent> {
        match part {
            ReplyPart::Text(text) => {
                self.text.push_str(&text);
                vec![ChatEvent::Text(text)]
            }
            ReplyPart::Reasoning(text) => {
                self.reasoning.push_str(&text);
                vec![ChatEvent::Reasoning(text)]
            }
            ReplyPart::CallBegin { index, name } => {
                let id = format!("{}{index:02}", self.ids);
                self.calls.push(ToolCall {
                    id: id.clone(),
                    name: name.clone(),
                    arguments: String::new(),
                    is_whole: false,
                });
                vec![ChatEvent::ToolCall(ToolCallEvent::Begin { index, id, name })]
            }
            ReplyPart::Arguments { json, .. } if json.is_empty() => Vec::new(),
            ReplyPart::Arguments { json, .. } => vec![self.argue(json)],
            ReplyPart::CallEnd { is_closed } => self.end(is_closed),
            ReplyPart::Markup(_) => Vec::new(),
        }
    }

    fn argue(&mut self, json: String) -> ChatEvent {
        let index = self.calls.len() - 1;
        self.calls[index].arguments.push_str(&json);
        ChatEvent::ToolCall(ToolCallEvent::Arguments { index, json })
    }

    fn end(&mut self, is_closed: bool) -> Vec<ChatEvent> {
        let index = self.calls.len() - 1;
        // A complete call without any arguments gets the empty object.
        let none = (is_closed && self.calls[index].arguments.is_empty()).then(|| self.argue("{}".to_owned()));
        let call = &mut self.calls[index];
        call.is_whole = is_closed && call.parsed().is_some();
        let end = ToolCallEvent::End { index, is_whole: call.is_whole };
        none.into_iter().chain([ChatEvent::ToolCall(end)]).collect()
    }

    /// Number of complete calls.
    pub(super) fn whole_calls(&self) -> usize {
        self.calls.iter().filter(|call| call.is_whole).count()
    }

    /// Whether the reply has a complete tool call, which determines its finish reason.
    pub(super) fn calls_tools(&self) -> bool {
        self.calls.iter().any(|call| call.is_whole)
    }
}

#[cfg(test)]
mod tests {
    use bursar_model::text::{ReasoningTags, ReplyParser, Thinking, ToolFormat};

    use super::*;

    fn answer_and_events(reply: &str) -> (Answer, Vec<ChatEvent>) {
        let (mut parser, mut answer) =
            (ReplyParser::new(Thinking::Possible(ReasoningTags::THINK), ToolFormat::Hermes, []), Answer::new());
        let mut parts = parser.feed(reply);
        parts.extend(parser.finish());
        let events = parts.into_iter().flat_map(|part| answer.take(part)).collect();
        (answer, events)
    }

    #[test]
    fn the_events_of_an_answer_add_up_to_the_answer() {
        let reply = "<think>\nHm.\n</think>\n\nSo:\n<tool_call>\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>\n\
                     <tool_call>{\"name\": \"b\"}</tool_call>";
        let (answer, events) = answer_and_events(reply);
        assert_eq!((answer.reasoning.as_str(), answer.text.as_str()), ("Hm.", "So:"));
        assert!(answer.calls_tools());
        let [a, b] = &answer.calls[..] else { panic!("the answer has two calls: {:?}", answer.calls) };
        assert_eq!((a.name.as_str(), a.arguments.as_str(), a.is_whole), ("a", "{\"x\": 1}", true));
        assert_eq!((b.name.as_str(), b.arguments.as_str(), b.is_whole), ("b", "{}", true));
        assert!(a.id.starts_with("call_") && a.id != b.id && answer_and_events(reply).0.calls[0].id != a.id);
        let call = ChatEvent::ToolCall;
        let begin =
            |index, of: &ToolCall| call(ToolCallEvent::Begin { index, id: of.id.clone(), name: of.name.clone() });
        let arguments = |index, json: &str| call(ToolCallEvent::Arguments { index, json: json.to_owned() });
        let end = |index| call(ToolCallEvent::End { index, is_whole: true });
        let expected = [
            ChatEvent::Reasoning("Hm.".into()),
            ChatEvent::Text("So:".into()),
            begin(0, a),
            arguments(0, "{\"x\": 1}"),
            end(0),
            begin(1, b),
            arguments(1, "{}"),
            end(1),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn a_call_with_invalid_json_arguments_is_not_whole() {
        for arguments in ["{\"x\": 1,, }", "{\"x\": \"a\nb\"}", "{\"x\": 1"] {
            let (answer, _) = answer_and_events(&format!("<tool_call>{{\"name\": \"a\", \"arguments\": {arguments}"));
            assert_eq!((answer.calls[0].arguments.as_str(), answer.calls[0].is_whole), (arguments, false));
            assert!(!answer.calls_tools());
            assert_eq!(answer.whole_calls(), 0, "a call with invalid arguments does not count, so the reply goes on");
            let value = serde_json::Value::from(answer.calls[0].clone());
            assert_eq!(value["function"]["arguments"], arguments, "the call can be passed to the model again");
        }
    }
}
