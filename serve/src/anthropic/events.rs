//! Events of a streamed message.

use std::time::Duration;

use axum::response::Response;
use bursar::{ChatError, ChatEvent, Reply, ToolCallEvent};
use serde_json::{Value, json};

use super::answer::{Block, Head, SIGNATURE, UsageBody};
use crate::{
    error::{ApiError, Shape},
    guard::Held,
    openai::usage::UsageBody as Counts,
    sse,
};

/// Streams a reply until `message_stop` or `error`. The chat must request token ids
/// ([`Chat::token_ids`](bursar::Chat::token_ids)): the reply then starts with the ids of the
/// prompt, and `message_start` reports their number.
pub(super) fn stream(head: Head, reply: Reply, held: Held, keep_alive: Duration) -> Response {
    let encoder = EventEncoder { head, blocks: 0, open: None, held };
    let events = sse::encoded(reply, encoder, |encoder, event| {
        let is_last = matches!(event, Ok(ChatEvent::Done { .. }) | Err(_));
        (encoder.encode(event).iter().map(sse::typed).collect(), is_last)
    });
    sse::response(events, keep_alive)
}

struct EventEncoder {
    head: Head,
    /// Number of blocks started so far.
    blocks: usize,
    open: Option<Open>,
    held: Held,
}

/// Kind of the open content block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
    Call,
}

impl EventEncoder {
    fn encode(&mut self, event: Result<ChatEvent, ChatError>) -> Vec<Value> {
        match event {
            Ok(ChatEvent::PromptIds(ids)) => {
                let usage = UsageBody::of_prompt(ids.len());
                let message = self.head.message(Vec::new(), (None, None), usage);
                vec![json!({"type": "message_start", "message": message}), json!({"type": "ping"})]
            }
            Ok(ChatEvent::Text(text)) => {
                let empty = Block::Text { text: String::new() };
                self.piece(Open::Text, empty, json!({"type": "text_delta", "text": text}))
            }
            Ok(ChatEvent::Reasoning(_)) if self.head.omits_thinking => Vec::new(),
            Ok(ChatEvent::Reasoning(text)) => {
                let empty = Block::Thinking { thinking: String::new(), signature: "" };
                self.piece(Open::Thinking, empty, json!({"type": "thinking_delta", "thinking": text}))
            }
            Ok(ChatEvent::ToolCall(ToolCallEvent::Begin { id, name, .. })) => {
                self.begin(Open::Call, Block::ToolUse { id, name, input: serde_json::Map::new() })
            }
            Ok(ChatEvent::ToolCall(ToolCallEvent::Arguments { json, .. })) => {
                vec![self.delta(json!({"type": "input_json_delta", "partial_json": json}))]
            }
            Ok(ChatEvent::ToolCall(ToolCallEvent::End { .. })) => self.close(),
            Ok(ChatEvent::Done { finish_reason, stop_reason, usage, .. }) => {
                self.held.used(Counts::of([usage]));
                let mut events = self.close();
                let (reason, sequence) = self.head.stopped(finish_reason, stop_reason, &usage);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                events.push(json!({"type": "message_delta", "delta": delta, "usage": UsageBody::from(usage)}));
                events.push(json!({"type": "message_stop"}));
                events
            }
            Ok(_) => Vec::new(),
            Err(error) => vec![ApiError::from(error).body(Shape::Anthropic)],
        }
    }

    /// Sends a piece of a block. Starts a new block if no block of this kind is open.
    fn piece(&mut self, kind: Open, empty: Block, delta: Value) -> Vec<Value> {
        let mut events = if self.open == Some(kind) { Vec::new() } else { self.begin(kind, empty) };
        events.push(self.delta(delta));
        events
    }

    fn begin(&mut self, kind: Open, empty: Block) -> Vec<Value> {
        let mut events = self.close();
        events.push(json!({"type": "content_block_start", "index": self.blocks, "content_block": empty}));
        self.blocks += 1;
        self.open = Some(kind);
        events
    }

    fn close(&mut self) -> Vec<Value> {
        let Some(open) = self.open else { return Vec::new() };
        let mut events = Vec::new();
        if open == Open::Thinking {
            events.push(self.delta(json!({"type": "signature_delta", "signature": SIGNATURE})));
        }
        events.push(json!({"type": "content_block_stop", "index": self.blocks - 1}));
        self.open = None;
        events
    }

    fn delta(&self, delta: Value) -> Value {
        // Deltas are sent only after a block has started.
        json!({"type": "content_block_delta", "index": self.blocks.saturating_sub(1), "delta": delta})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bursar::{FinishReason, Usage};

    fn encoder() -> EventEncoder {
        let head = Head { id: "msg_1".to_owned(), model: "demo".to_owned(), omits_thinking: false, tokens_max: 8 };
        EventEncoder { head, blocks: 0, open: None, held: Held::default() }
    }

    /// The types of the events, with the index of their block.
    fn encode(events: Vec<Result<ChatEvent, ChatError>>) -> Vec<(String, Option<u64>)> {
        let mut encoder = encoder();
        let events = events.into_iter().flat_map(|event| encoder.encode(event));
        events
            .map(|event| {
                let kind = event.pointer("/delta/type").or_else(|| event.get("type")).and_then(Value::as_str);
                (kind.unwrap_or_default().to_owned(), event["index"].as_u64())
            })
            .collect()
    }

    fn call(event: ToolCallEvent) -> Result<ChatEvent, ChatError> {
        Ok(ChatEvent::ToolCall(event))
    }

    #[test]
    fn each_content_block_ends_before_the_next_begins() {
        let events = vec![
            Ok(ChatEvent::PromptIds(vec![1, 2, 3].into())),
            Ok(ChatEvent::Reasoning("h".to_owned())),
            Ok(ChatEvent::Reasoning("m".to_owned())),
            Ok(ChatEvent::Text("yes".to_owned())),
            call(ToolCallEvent::Begin { index: 0, id: "a".to_owned(), name: "f".to_owned() }),
            call(ToolCallEvent::Arguments { index: 0, json: "{}".to_owned() }),
            call(ToolCallEvent::End { index: 0, is_whole: true }),
            Ok(ChatEvent::done("yes", FinishReason::ToolCalls, Usage::default())),
        ];
        let wanted = [
            ("message_start", None),
            ("ping", None),
            ("content_block_start", Some(0)),
            ("thinking_delta", Some(0)),
            ("thinking_delta", Some(0)),
            ("signature_delta", Some(0)),
            ("content_block_stop", Some(0)),
            ("content_block_start", Some(1)),
            ("text_delta", Some(1)),
            ("content_block_stop", Some(1)),
            ("content_block_start", Some(2)),
            ("input_json_delta", Some(2)),
            ("content_block_stop", Some(2)),
            ("message_delta", None),
            ("message_stop", None),
        ];
        assert_eq!(encode(events), wanted.map(|(kind, index)| (kind.to_owned(), index)));
    }

    #[test]
    fn a_failed_reply_ends_with_an_error_in_anthropics_format() {
        let error = ChatError::Stopped { reason: "it died".into() };
        let events = encoder().encode(Err(error));
        assert_eq!(events[0]["error"]["type"], "overloaded_error");
        assert_eq!(events.len(), 1);
    }
}
