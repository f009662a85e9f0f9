//! Responses of `POST /v1/messages`.

use bursar::{ChatError, ChatEvent, FinishReason, Reply, StopReason, ToolCall, Usage};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{guard::Held, openai::usage::UsageBody as Counts};

/// Signature of every thinking block, because clients keep only signed blocks. This server does not
/// check signatures.
pub(super) const SIGNATURE: &str = "bursar";

#[derive(Serialize)]
pub(super) struct Message<'a> {
    pub(super) id: &'a str,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) role: &'static str,
    pub(super) model: &'a str,
    pub(super) content: Vec<Block>,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<String>,
    pub(super) usage: UsageBody,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block {
    Text { text: String },
    Thinking { thinking: String, signature: &'static str },
    ToolUse { id: String, name: String, input: Map<String, Value> },
}

/// Token usage as Anthropic counts it: prompt tokens from the prefix cache are reported separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct UsageBody {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
    output_tokens_details: OutputTokens,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct OutputTokens {
    thinking_tokens: usize,
}

impl UsageBody {
    /// Usage at the start of a stream, before anything is computed.
    pub(super) fn of_prompt(tokens: usize) -> Self {
        UsageBody { input_tokens: tokens, ..UsageBody::default() }
    }
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        UsageBody {
            input_tokens: usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokens { thinking_tokens: usage.reasoning_tokens },
        }
    }
}

/// Fields that all answers to one request share, and settings that shape them.
pub(super) struct Head {
    pub(super) id: String,
    /// The name that the client used.
    pub(super) model: String,
    /// `true` if the client wants no thinking blocks.
    pub(super) omits_thinking: bool,
    pub(super) tokens_max: usize,
}

impl Head {
    pub(super) fn message(
        &self,
        content: Vec<Block>,
        (stop_reason, stop_sequence): (Option<&'static str>, Option<String>),
        usage: UsageBody,
    ) -> Message<'_> {
        let (id, model) = (&self.id, &self.model);
        Message { id, kind: "message", role: "assistant", model, content, stop_reason, stop_sequence, usage }
    }

    /// Returns `stop_reason` and `stop_sequence`. A reply that was cut before `tokens_max` has
    /// reached the context limit.
    pub(super) fn stopped(
        &self,
        finish: FinishReason,
        rule: Option<StopReason>,
        usage: &Usage,
    ) -> (Option<&'static str>, Option<String>) {
        match (finish, rule) {
            (FinishReason::Length, _) if usage.completion_tokens < self.tokens_max => {
                (Some("model_context_window_exceeded"), None)
            }
            (FinishReason::Length, _) => (Some("max_tokens"), None),
            (FinishReason::ToolCalls, _) => (Some("tool_use"), None),
            (_, Some(StopReason::String(sequence))) => (Some("stop_sequence"), Some(sequence)),
            _ => (Some("end_turn"), None),
        }
    }
}

/// Waits for the end of a reply. Dropping the future, as on a client disconnect, cancels the reply.
pub(super) async fn whole(head: &Head, mut reply: Reply, held: Held) -> Result<Value, ChatError> {
    while let Some(event) = reply.next().await {
        if let ChatEvent::Done { text, reasoning, tool_calls, finish_reason, stop_reason, usage, .. } = event? {
            held.used(Counts::of([usage]));
            let is_cut = finish_reason == FinishReason::Length;
            let content = blocks(head, text, reasoning, calls(tool_calls, is_cut));
            let stopped = head.stopped(finish_reason, stop_reason, &usage);
            // Serialization cannot fail: the maps in these types have string keys.
            return Ok(serde_json::to_value(head.message(content, stopped, usage.into())).unwrap_or_default());
        }
    }
    Err(ChatError::Stopped { reason: "the reply ended without a Done event".into() })
}

fn blocks(head: &Head, text: String, thinking: String, calls: impl Iterator<Item = Block>) -> Vec<Block> {
    let mut blocks = Vec::new();
    if !thinking.is_empty() && !head.omits_thinking {
        blocks.push(Block::Thinking { thinking, signature: SIGNATURE });
    }
    if !text.is_empty() {
        blocks.push(Block::Text { text });
    }
    blocks.extend(calls);
    blocks
}

/// Converts tool calls to blocks. If the reply was cut off within its last call, this call gets an
/// empty input, as at the start of a stream. The `stop_reason` keeps clients from running this
/// call. If the arguments of another call are not a JSON object, they are sent under the
/// key that Anthropic uses for invalid JSON. Otherwise, a client would run the tool without the
/// arguments that the model wrote.
fn calls(calls: Vec<ToolCall>, is_cut: bool) -> impl Iterator<Item = Block> {
    let cut = if is_cut { calls.len().checked_sub(1) } else { None };
    calls.into_iter().enumerate().map(move |(at, call)| {
        let input = match call.parsed() {
            Some(input) => input,
            None if cut == Some(at) => Map::new(),
            None => Map::from_iter([("INVALID_JSON".to_owned(), Value::String(call.arguments.clone()))]),
        };
        Block::ToolUse { id: call.id, name: call.name, input }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn head() -> Head {
        Head { id: "msg_1".to_owned(), model: "demo".to_owned(), omits_thinking: false, tokens_max: 8 }
    }

    #[test]
    fn each_finish_reason_has_its_anthropic_stop_reason() {
        let usage = |tokens| {
            let mut usage = Usage::default();
            usage.completion_tokens = tokens;
            usage
        };
        let rule = Some(StopReason::String("\n".to_owned()));
        for (finish, rule, tokens, expected) in [
            (FinishReason::Stop, None, 3, (Some("end_turn"), None)),
            (FinishReason::Stop, rule, 3, (Some("stop_sequence"), Some("\n".to_owned()))),
            (FinishReason::Length, None, 8, (Some("max_tokens"), None)),
            (FinishReason::Length, None, 7, (Some("model_context_window_exceeded"), None)),
            (FinishReason::ToolCalls, None, 3, (Some("tool_use"), None)),
        ] {
            assert_eq!(head().stopped(finish, rule, &usage(tokens)), expected);
        }
    }

    #[test]
    fn answer_blocks_are_thinking_then_text_then_tool_calls() {
        let call = |arguments: &str| ToolCall {
            id: "a".to_owned(),
            name: "f".to_owned(),
            arguments: arguments.to_owned(),
            is_whole: arguments.ends_with('}'),
        };
        let both = || vec![call(r#"{"x": 1}"#), call(r#"{"x": "#)];
        let found = blocks(&head(), "yes".to_owned(), "hm".to_owned(), calls(both(), true));
        assert_eq!(
            serde_json::to_value(found).expect("JSON"),
            json!([
                {"type": "thinking", "thinking": "hm", "signature": SIGNATURE},
                {"type": "text", "text": "yes"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ])
        );
        let value = serde_json::to_value(calls(both(), false).collect::<Vec<_>>()).expect("JSON");
        assert_eq!(value[0]["input"], json!({"x": 1}));
        assert_eq!(value[1]["input"], json!({"INVALID_JSON": "{\"x\": "}));
        let broken = || both().into_iter().rev().collect::<Vec<_>>();
        let value = serde_json::to_value(calls(broken(), true).collect::<Vec<_>>()).expect("JSON");
        assert_eq!(value[0]["input"], json!({"INVALID_JSON": "{\"x\": "}), "only the last call is cut off");
    }

    #[test]
    fn cached_tokens_are_reported_separately_from_input_tokens() {
        let mut usage = Usage::default();
        (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) = (10, 4, 3);
        let value = serde_json::to_value(UsageBody::from(usage)).expect("JSON");
        assert_eq!((&value["input_tokens"], &value["cache_read_input_tokens"]), (&json!(6), &json!(4)));
    }
}
