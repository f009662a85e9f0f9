//! Replies in the form that Dynamo's frontend reads: one chunk per token, then exactly one final
//! chunk or one error.

use std::sync::Arc;

use bursar::{ChatEvent, FinishReason, Reply, TokenScore, Usage};
use bursar_serve::ReadPictures;
use dynamo_backend_common::{
    AsyncEngineContext, CompletionUsage, DynamoError, LLMEngineOutput, LLMEngineOutputExt, PromptTokensDetails,
    StopReason, TopLogprob, chunk,
};
use futures::stream::BoxStream;

use crate::{fault::of_chat, feed::HitCount};

/// The data of a request that its stream of chunks needs.
pub(crate) struct ReplyContext {
    pub(crate) context: Arc<dyn AsyncEngineContext>,
    /// Whether log-probabilities are sent with the tokens.
    pub(crate) is_scored: bool,
    /// Stop tokens that are part of the reply.
    pub(crate) visible_ends: Vec<u32>,
    pub(crate) hits: Arc<HitCount>,
    /// Kept while the request runs, so that its pictures count toward the worker's limit.
    pub(crate) pictures: Option<ReadPictures>,
}

/// Returns an empty reply, for a client that disconnected before the reply began.
pub(crate) fn cancelled() -> BoxStream<'static, Result<LLMEngineOutput, DynamoError>> {
    Box::pin(futures::stream::once(async { Ok(LLMEngineOutput::cancelled()) }))
}

/// Streams the chunks of a reply. Dropping the stream cancels the request.
pub(crate) fn chunks(
    mut reply: Reply,
    reply_context: ReplyContext,
) -> BoxStream<'static, Result<LLMEngineOutput, DynamoError>> {
    Box::pin(async_stream::stream! {
        let ReplyContext { context, is_scored, visible_ends, hits, pictures } = reply_context;
        let _pictures = pictures;
        loop {
            let event = tokio::select! {
                biased;
                () = context.stopped() => {
                    yield Ok(LLMEngineOutput::cancelled());
                    return;
                }
                event = reply.next() => event,
            };
            match event {
                Some(Ok(ChatEvent::TokenId(id))) if !is_scored => yield Ok(chunk::token(id)),
                Some(Ok(ChatEvent::Token(score))) if is_scored => yield Ok(scored(score)),
                Some(Ok(ChatEvent::Done { finish_reason, stop_reason, end_token, usage, .. })) => {
                    hits.count(&usage);
                    let stop = match stop_reason {
                        Some(bursar::StopReason::Token(token)) => Some(StopReason::Int(i64::from(token))),
                        Some(bursar::StopReason::String(text)) => Some(StopReason::String(text)),
                        None => None,
                    };
                    let shown: Vec<u32> = end_token.into_iter().filter(|token| visible_ends.contains(token)).collect();
                    let end = match finish_reason {
                        FinishReason::Length => LLMEngineOutput::length(),
                        _ => LLMEngineOutput { stop_reason: stop, ..LLMEngineOutput::stop() },
                    };
                    let usage = self::usage(&usage, shown.len());
                    yield Ok(end.with_tokens(shown).with_usage(usage));
                    return;
                }
                // Text is skipped, because the frontend makes text from tokens. Token ids are
                // skipped if the same tokens arrive with scores.
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    yield Err(of_chat(&error));
                    return;
                }
                // Unreachable, because every reply has an end.
                None => return,
            }
        }
    })
}

fn scored(score: TokenScore) -> LLMEngineOutput {
    let probability = |value: f32| f64::from(value);
    let top = |(rank, token): (usize, bursar::ScoredToken)| TopLogprob {
        rank: rank as u32 + 1,
        token_id: token.id,
        bytes: Some(token.text.as_bytes().to_vec()),
        token: Some(token.text),
        logprob: probability(token.log_probability),
    };
    LLMEngineOutput {
        log_probs: Some(vec![probability(score.token.log_probability)]),
        top_logprobs: Some(vec![score.top.into_iter().enumerate().map(top).collect()]),
        ..chunk::token(score.token.id)
    }
}

/// Usage for Dynamo. Dynamo counts the `shown` stop tokens as part of the reply,
/// and Bursar does not.
fn usage(usage: &Usage, shown: usize) -> CompletionUsage {
    let (prompt, completion) = (usage.prompt_tokens as u32, (usage.completion_tokens + shown) as u32);
    let cached =
        PromptTokensDetails { cached_tokens: Some(usage.cached_tokens as u32), ..PromptTokensDetails::default() };
    CompletionUsage { prompt_tokens_details: Some(cached), ..dynamo_backend_common::usage(prompt, completion) }
}
