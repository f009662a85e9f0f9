//! Chunks of a streamed chat.

use std::{mem, sync::Arc, time::Duration};

use axum::response::{Response, sse::Event};
use bursar::{ChatError, ChatEvent, Reply, TokenScore, ToolCallEvent, Usage};
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    chunks::{self, Chunks},
    log_probabilities::ChatLogProbabilities,
    stop_reason::StopReasonBody,
    usage::UsageBody,
};
use crate::{error::ApiError, request_message::MediaFields, sse};

/// A choice of a `chat.completion.chunk`.
#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "ChatChunkChoice")]
pub(crate) struct Choice {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogProbabilities>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReasonBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The part of the reply that a chunk adds.
#[derive(Default, Serialize, JsonSchema)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    /// Null if there is no reasoning: clients of DeepSeek and SGLang read this field without
    /// checking that it is present.
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

#[derive(Default, Serialize, JsonSchema)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Default, Serialize, JsonSchema)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// Streams the replies. The first chunk of each reply has its role.
pub(super) fn stream(chunks: Chunks, places: MediaFields, replies: Vec<Reply>, keep_alive: Duration) -> Response {
    let samples = replies.iter().map(|_| Sample::default()).collect();
    let encoder = ChatEncoder { chunks, places, samples };
    let greetings = (0..replies.len()).map(|index| encoder.greeting(index)).collect();
    chunks::stream(greetings, replies, encoder, keep_alive)
}

struct ChatEncoder {
    chunks: Chunks,
    places: MediaFields,
    samples: Vec<Sample>,
}

#[derive(Default)]
struct Sample {
    /// Log-probabilities of tokens whose text has not been sent yet.
    scores: Vec<TokenScore>,
    /// Ids of the same tokens, if requested.
    ids: Option<Vec<u32>>,
    prompt_ids: Option<Arc<[u32]>>,
    usage: Usage,
}

impl chunks::ChunkEncoder for ChatEncoder {
    fn encode(&mut self, index: usize, event: ChatEvent) -> Vec<Event> {
        let delta = match event {
            ChatEvent::Token(score) => {
                self.samples[index].scores.push(score);
                return Vec::new();
            }
            ChatEvent::TokenId(id) => {
                self.samples[index].ids.get_or_insert_default().push(id);
                return Vec::new();
            }
            ChatEvent::PromptIds(ids) => {
                self.samples[index].prompt_ids = Some(ids);
                return Vec::new();
            }
            ChatEvent::Text(text) => Delta { content: Some(text), ..Delta::default() },
            ChatEvent::Reasoning(text) => {
                Delta { reasoning_content: Some(text.clone()), reasoning: Some(text), ..Delta::default() }
            }
            ChatEvent::ToolCall(ToolCallEvent::Begin { index, id, name }) => called(CallDelta {
                index,
                id: Some(id),
                kind: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: String::new() },
            }),
            ChatEvent::ToolCall(ToolCallEvent::Arguments { index, json }) => {
                let function = FunctionDelta { name: None, arguments: json };
                called(CallDelta { index, function, ..CallDelta::default() })
            }
            ChatEvent::Done { finish_reason, stop_reason, usage, .. } => {
                self.samples[index].usage = usage;
                let (finish_reason, stop_reason) = (Some(finish_reason.label()), stop_reason.map(StopReasonBody::from));
                let last = self.chunk(Choice { index, finish_reason, stop_reason, ..Choice::default() });
                let samples = &self.samples;
                let rest = self.chunks.end::<Choice>(|| UsageBody::of(samples.iter().map(|sample| sample.usage)));
                return [last].into_iter().chain(rest).collect();
            }
            _ => return Vec::new(),
        };
        vec![self.chunk(Choice { index, delta, ..Choice::default() })]
    }

    fn failed(&self, error: ChatError) -> ApiError {
        self.places.error(error)
    }

    fn has_ended(&self) -> bool {
        self.chunks.has_ended()
    }
}

impl ChatEncoder {
    fn greeting(&self, index: usize) -> Event {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
        sse::json(&self.chunks.chunk(Choice { index, delta, ..Choice::default() }))
    }

    /// Returns a chunk with the scores and ids of all tokens since the previous chunk.
    fn chunk(&mut self, mut choice: Choice) -> Event {
        let sample = &mut self.samples[choice.index];
        choice.logprobs = ChatLogProbabilities::of(mem::take(&mut sample.scores));
        choice.token_ids = sample.ids.take();
        let prompt_token_ids = sample.prompt_ids.take();
        sse::json(&self.chunks.chunk(choice).with_prompt(prompt_token_ids))
    }
}

fn called(call: CallDelta) -> Delta {
    Delta { tool_calls: Some([call]), ..Delta::default() }
}
