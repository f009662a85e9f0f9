//! Response to a chat that is not streamed.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use bursar::{ChatError, ChatEvent, Reply, TokenScore, ToolCall, Usage};
use futures_util::future::try_join_all;
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    head::{Answer, Head},
    log_probabilities::ChatLogProbabilities,
    stop_reason::StopReasonBody,
    usage::UsageBody,
};
use crate::guard::Held;

/// A `chat.completion` that is not streamed.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Completion<'a> {
    #[serde(flatten)]
    answer: Answer<'a, Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptToken>>>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatChoice")]
struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogProbabilities>,
    finish_reason: &'static str,
    stop_reason: Option<StopReasonBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize, JsonSchema)]
struct Message {
    role: &'static str,
    /// Null if the model only calls tools.
    content: Option<String>,
    refusal: Option<()>,
    /// Same text as `reasoning`. Clients of DeepSeek and SGLang read `reasoning_content`, even if
    /// it is null. Clients of vLLM read `reasoning`.
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallTold>,
}

/// A tool call of the reply.
#[derive(Serialize, JsonSchema)]
struct CallTold {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionTold,
}

#[derive(Serialize, JsonSchema)]
struct FunctionTold {
    name: String,
    arguments: String,
}

impl From<ToolCall> for CallTold {
    fn from(call: ToolCall) -> Self {
        let function = FunctionTold { name: call.name, arguments: call.arguments };
        CallTold { id: call.id, kind: "function", function }
    }
}

/// A token of the prompt: vLLM's `prompt_logprobs`, by token id.
type PromptToken = BTreeMap<u32, PromptTokenTold>;

#[derive(Serialize, JsonSchema)]
pub(super) struct PromptTokenTold {
    logprob: f32,
    rank: Option<usize>,
    decoded_token: String,
}

/// Waits for all samples. Dropping the future, as on a client disconnect, cancels them.
pub(super) async fn answer(head: Head, replies: Vec<Reply>, held: Held) -> Result<Response, ChatError> {
    let ended = try_join_all(replies.into_iter().map(end)).await?;
    let usage = UsageBody::of(ended.iter().map(|ended| ended.usage));
    held.used(usage);
    drop(held);
    let (mut prompt, mut prompt_token_ids) = (None, None);
    let choices = ended.into_iter().enumerate().map(|(index, ended)| {
        prompt = prompt.take().or(ended.prompt);
        prompt_token_ids = prompt_token_ids.take().or(ended.prompt_ids);
        Choice { index, ..ended.choice }
    });
    let choices = choices.collect();
    let answer = head.answer(choices, Some(Some(usage))).with_prompt(prompt_token_ids);
    let prompt_logprobs = prompt.map(|tokens| tokens.into_iter().map(|score| score.map(prompt_token)).collect());
    Ok(Json(Completion { answer, prompt_logprobs }).into_response())
}

fn prompt_token(score: TokenScore) -> PromptToken {
    let entry = |token: bursar::ScoredToken, rank| {
        let logprob = super::log_probabilities::finite(token.log_probability);
        (token.id, PromptTokenTold { logprob, rank, decoded_token: token.text })
    };
    let mut tokens: PromptToken = [entry(score.token, None)].into();
    tokens.extend(score.top.into_iter().enumerate().map(|(at, token)| entry(token, Some(at + 1))));
    tokens
}

struct Ended {
    choice: Choice,
    usage: Usage,
    prompt: Option<Vec<Option<TokenScore>>>,
    prompt_ids: Option<Arc<[u32]>>,
}

async fn end(mut reply: Reply) -> Result<Ended, ChatError> {
    let (mut scores, mut prompt, mut prompt_ids, mut ids) = (Vec::new(), None, None, None);
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::Token(score) => scores.push(score),
            ChatEvent::Prompt(scores) => prompt = Some(scores),
            ChatEvent::PromptIds(ids) => prompt_ids = Some(ids),
            ChatEvent::TokenId(id) => ids.get_or_insert_with(Vec::new).push(id),
            ChatEvent::Done { text, reasoning, tool_calls, finish_reason, stop_reason, usage, .. } => {
                let reasoning = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
                let content = Some(text).filter(|text| !text.is_empty() || tool_calls.is_empty());
                let message = Message {
                    role: "assistant",
                    content,
                    refusal: None,
                    reasoning_content: reasoning.clone(),
                    reasoning,
                    tool_calls: tool_calls.into_iter().map(CallTold::from).collect(),
                };
                let logprobs = ChatLogProbabilities::of(scores);
                let stop_reason = stop_reason.map(StopReasonBody::from);
                let finish_reason = finish_reason.label();
                let choice = Choice { index: 0, message, logprobs, finish_reason, stop_reason, token_ids: ids };
                return Ok(Ended { choice, usage, prompt, prompt_ids });
            }
            _ => {}
        }
    }
    Err(ChatError::Stopped { reason: "the reply ended without a Done event".into() })
}
