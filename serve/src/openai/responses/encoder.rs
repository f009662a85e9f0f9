//! Encoder of a response: the events of its stream, and the complete response.

use bursar::{ChatError, ChatEvent, FinishReason, ToolCallEvent, Usage};
use serde_json::{Value, json};

use super::tools::{Callee, Tools, as_input};
use crate::{
    error::{ApiError, Shape},
    id,
};

pub(super) struct ResponseEncoder {
    /// The response object in OpenAI's format. Its `output` is filled at the end.
    pub(super) response: Value,
    output: Vec<Value>,
    tools: Tools,
    open: Option<Open>,
    events: u64,
}

/// The output item that is being streamed.
struct Open {
    kind: Kind,
    id: String,
    /// Text of a message or of reasoning, or arguments of a call.
    text: String,
}

enum Kind {
    Message,
    Reasoning,
    Call { call_id: String, of: Callee },
}

impl Open {
    fn item(&self, status: &str, is_begun: bool) -> Value {
        let id = &self.id;
        let content = if is_begun { vec![self.part(&self.text)] } else { Vec::new() };
        match &self.kind {
            Kind::Message => json!({
                "id": id, "type": "message", "role": "assistant", "status": status, "content": content,
            }),
            Kind::Reasoning => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [], "content": content,
            }),
            Kind::Call { call_id, of } => {
                let kind = if of.is_custom { "custom_tool_call" } else { "function_call" };
                let mut call = json!({"id": id, "type": kind, "status": status, "call_id": call_id, "name": of.name});
                if of.is_custom {
                    call["input"] = self.input().into()
                } else {
                    call["arguments"] = self.text.as_str().into()
                }
                if let Some(namespace) = &of.namespace {
                    call["namespace"] = namespace.as_str().into();
                }
                call
            }
        }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        }
    }

    /// Input of a custom tool, which the model writes as an argument.
    fn input(&self) -> String {
        as_input(&self.text)
    }

    fn is_custom(&self) -> bool {
        matches!(&self.kind, Kind::Call { of, .. } if of.is_custom)
    }

    fn has_parts(&self) -> bool {
        !matches!(self.kind, Kind::Call { .. })
    }

    /// Prefix of the names of the item's events.
    fn name(&self) -> &'static str {
        match &self.kind {
            Kind::Message => "response.output_text",
            Kind::Reasoning => "response.reasoning_text",
            Kind::Call { of, .. } if of.is_custom => "response.custom_tool_call_input",
            Kind::Call { .. } => "response.function_call_arguments",
        }
    }
}

impl ResponseEncoder {
    pub(super) fn new(response: Value, tools: Tools) -> Self {
        ResponseEncoder { response, output: Vec::new(), tools, open: None, events: 0 }
    }

    /// Returns the events at the start of the stream.
    pub(super) fn begin(&mut self) -> Vec<Value> {
        ["response.created", "response.in_progress"].map(|kind| self.whole(kind)).into()
    }

    /// Converts one event of the reply to events of the stream. Returns `true` if the stream ends
    /// after them.
    pub(super) fn encode(&mut self, event: Result<ChatEvent, ChatError>) -> (Vec<Value>, bool) {
        let events = match event {
            Ok(ChatEvent::Text(text)) => self.piece("msg_", Kind::Message, &text),
            Ok(ChatEvent::Reasoning(text)) => self.piece("rs_", Kind::Reasoning, &text),
            Ok(ChatEvent::ToolCall(ToolCallEvent::Begin { id, name, .. })) => {
                let of = self.tools.of(name);
                let prefix = if of.is_custom { "ctc_" } else { "fc_" };
                self.open(prefix, Kind::Call { call_id: id, of })
            }
            Ok(ChatEvent::ToolCall(ToolCallEvent::Arguments { json, .. })) => self.delta(&json),
            Ok(ChatEvent::ToolCall(ToolCallEvent::End { is_whole, .. })) => self.close(is_whole),
            Ok(ChatEvent::Done { finish_reason, usage, .. }) => return (self.end(finish_reason, usage), true),
            Ok(_) => Vec::new(),
            Err(error) => return (self.fail(error), true),
        };
        (events, false)
    }

    fn piece(&mut self, prefix: &str, kind: Kind, text: &str) -> Vec<Value> {
        let same = |open: &Open| std::mem::discriminant(&open.kind) == std::mem::discriminant(&kind);
        let mut events = if self.open.as_ref().is_some_and(same) { Vec::new() } else { self.open(prefix, kind) };
        events.extend(self.delta(text));
        events
    }

    fn open(&mut self, prefix: &str, kind: Kind) -> Vec<Value> {
        let mut events = self.close(true);
        let open = Open { kind, id: id::fresh(prefix), text: String::new() };
        let added = json!({"output_index": self.output.len(), "item": open.item("in_progress", false)});
        events.push(self.event("response.output_item.added", added));
        if open.has_parts() {
            let part = json!({"part": open.part(""), "content_index": 0});
            events.push(self.of_item(&open, "response.content_part.added", part));
        }
        self.open = Some(open);
        events
    }

    fn delta(&mut self, text: &str) -> Vec<Value> {
        let Some(mut open) = self.open.take() else { return Vec::new() };
        open.text += text;
        if open.is_custom() {
            // `close` sends the input of a custom tool in one piece, when its argument is complete.
            self.open = Some(open);
            return Vec::new();
        }
        let events = self.of_item(&open, &format!("{}.delta", open.name()), placed(&open, json!({"delta": text})));
        self.open = Some(open);
        vec![events]
    }

    fn close(&mut self, is_whole: bool) -> Vec<Value> {
        let Some(open) = self.open.take() else { return Vec::new() };
        let mut events = Vec::new();
        let done = format!("{}.done", open.name());
        if open.is_custom() {
            let input = open.input();
            events.push(self.of_item(&open, &format!("{}.delta", open.name()), json!({"delta": input})));
            events.push(self.of_item(&open, &done, json!({"input": input})));
        } else if let Kind::Call { of, .. } = &open.kind {
            events.push(self.of_item(&open, &done, json!({"name": of.name, "arguments": open.text})));
        } else {
            events.push(self.of_item(&open, &done, placed(&open, json!({"text": open.text}))));
            let part = json!({"part": open.part(&open.text), "content_index": 0});
            events.push(self.of_item(&open, "response.content_part.done", part));
        }
        let item = open.item(if is_whole { "completed" } else { "incomplete" }, true);
        events.push(self.event("response.output_item.done", json!({"output_index": self.output.len(), "item": item})));
        self.output.push(item);
        events
    }

    fn end(&mut self, finish: FinishReason, usage: Usage) -> Vec<Value> {
        let is_cut = finish == FinishReason::Length;
        let mut events = self.close(!is_cut);
        self.response["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        });
        if is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        events.push(self.last(if is_cut { "incomplete" } else { "completed" }));
        events
    }

    fn fail(&mut self, error: ChatError) -> Vec<Value> {
        let mut events = self.close(false);
        let message = ApiError::from(error).body(Shape::OpenAi)["error"]["message"].take();
        self.response["error"] = json!({"code": "server_error", "message": message});
        events.push(self.last("failed"));
        events
    }

    /// Returns the events after the client has canceled the response. OpenAI defines no event for
    /// a cancellation, so the last event's name follows the pattern of the other names.
    pub(super) fn cancel(&mut self) -> Vec<Value> {
        let mut events = self.close(false);
        events.push(self.last("cancelled"));
        events
    }

    fn last(&mut self, status: &str) -> Value {
        self.response["status"] = status.into();
        self.response["completed_at"] = id::now().into();
        self.response["output"] = std::mem::take(&mut self.output).into();
        self.whole(&format!("response.{status}"))
    }

    fn whole(&mut self, kind: &str) -> Value {
        let response = self.response.clone();
        self.event(kind, json!({"response": response}))
    }

    fn of_item(&mut self, open: &Open, kind: &str, mut fields: Value) -> Value {
        fields["item_id"] = open.id.as_str().into();
        fields["output_index"] = self.output.len().into();
        self.event(kind, fields)
    }

    fn event(&mut self, kind: &str, mut fields: Value) -> Value {
        fields["type"] = kind.into();
        fields["sequence_number"] = self.events.into();
        self.events += 1;
        fields
    }
}

/// Adds `content_index` if the item has parts, and empty `logprobs` if it is a message.
fn placed(open: &Open, mut fields: Value) -> Value {
    if open.has_parts() {
        fields["content_index"] = 0.into();
    }
    if matches!(open.kind, Kind::Message) {
        fields["logprobs"] = json!([]);
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(encoder: &mut ResponseEncoder, events: Vec<ChatEvent>) -> Vec<Value> {
        events.into_iter().flat_map(|event| encoder.encode(Ok(event)).0).collect()
    }

    #[test]
    fn each_output_item_is_added_streamed_and_done_in_order() {
        let mut encoder = ResponseEncoder::new(json!({"id": "resp_1"}), Tools::default());
        let mut events = encoder.begin();
        events.extend(encode(
            &mut encoder,
            vec![
                ChatEvent::Reasoning("hm".to_owned()),
                ChatEvent::Text("y".to_owned()),
                ChatEvent::Text("es".to_owned()),
                ChatEvent::ToolCall(ToolCallEvent::Begin { index: 0, id: "a".to_owned(), name: "f".to_owned() }),
                ChatEvent::ToolCall(ToolCallEvent::Arguments { index: 0, json: "{}".to_owned() }),
                ChatEvent::ToolCall(ToolCallEvent::End { index: 0, is_whole: true }),
                ChatEvent::done("yes", FinishReason::ToolCalls, Usage::default()),
            ],
        ));
        let kinds: Vec<_> =
            events.iter().filter_map(|event| event["type"].as_str()?.strip_prefix("response.")).collect();
        assert_eq!(
            kinds,
            [
                "created",
                "in_progress",
                "output_item.added",
                "content_part.added",
                "reasoning_text.delta",
                "reasoning_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "completed",
            ]
        );
        let numbers: Vec<_> = events.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
        assert!(numbers.iter().copied().eq(0..20), "{numbers:?}");
        assert_eq!(events[9]["output_index"], 1);
        assert_eq!(encoder.response["output"][1]["content"][0]["text"], "yes");
        assert_eq!(encoder.response["output"][2]["arguments"], "{}");
    }

    #[test]
    fn custom_and_namespace_tool_calls_are_streamed_in_client_format() {
        let tools = [
            json!({"type": "custom", "name": "patch"}),
            json!({"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]}),
        ];
        let tools = Tools::read(&tools).map_err(|_| ()).expect("tools");
        let mut encoder = ResponseEncoder::new(json!({}), tools);
        let call = |index: usize, name: &str, json: &str| {
            let begin = ToolCallEvent::Begin { index, id: index.to_string(), name: name.to_owned() };
            let arguments = ToolCallEvent::Arguments { index, json: json.to_owned() };
            [begin, arguments, ToolCallEvent::End { index, is_whole: true }].map(ChatEvent::ToolCall)
        };
        let event = [call(0, "patch", r#"{"input": "a\nb"}"#), call(1, "agents__wait", "{}")].concat();
        let events = encode(&mut encoder, event);
        let input = |event: &Value| event["type"].as_str().unwrap_or_default().contains("custom_tool_call_input");
        let inputs: Vec<_> = events.iter().filter(|event| input(event)).collect();
        assert_eq!(inputs.len(), 2, "{events:?}");
        assert_eq!((&inputs[0]["delta"], &inputs[1]["input"]), (&json!("a\nb"), &json!("a\nb")));
        let items: Vec<_> = events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
        let (patch, wait) = (&items[0]["item"], &items[1]["item"]);
        assert_eq!(
            (&patch["type"], &patch["name"], &patch["input"]),
            (&json!("custom_tool_call"), &json!("patch"), &json!("a\nb"))
        );
        assert_eq!(
            (&wait["namespace"], &wait["name"], &wait["arguments"]),
            (&json!("agents"), &json!("wait"), &json!("{}"))
        );
    }

    #[test]
    fn a_truncated_reply_is_incomplete_and_a_broken_reply_failed() {
        let mut cut = ResponseEncoder::new(json!({}), Tools::default());
        let events = encode(
            &mut cut,
            vec![ChatEvent::Text("ye".to_owned()), ChatEvent::done("ye", FinishReason::Length, Usage::default())],
        );
        assert_eq!(events.last().expect("an end")["type"], "response.incomplete");
        assert_eq!(cut.response["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(cut.response["output"][0]["status"], "incomplete");
        let mut broken = ResponseEncoder::new(json!({}), Tools::default());
        let (events, is_last) = broken.encode(Err(ChatError::Stopped { reason: "it died".into() }));
        assert!(is_last);
        assert_eq!(events[0]["response"]["error"]["code"], "server_error");
    }
}
