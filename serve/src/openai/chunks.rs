//! Streams of chunks for several concurrent replies.

use std::time::Duration;

use axum::response::{Response, sse::Event};
use bursar::{ChatError, ChatEvent, Reply};
use futures_util::{StreamExt, stream};
use serde::Serialize;

use super::{
    head::{Answer, Head},
    sampling::StreamOptions,
    usage::UsageBody,
};
use crate::{
    error::{ApiError, Shape},
    guard::Held,
    sse,
};

/// State that all chunks of a stream share.
pub(super) struct Chunks {
    head: Head,
    has_usage: bool,
    /// Replies that have not ended.
    open: usize,
    held: Held,
}

impl Chunks {
    pub(super) fn new(head: Head, options: StreamOptions, replies: usize, held: Held) -> Self {
        Chunks { head, has_usage: options.include_usage.unwrap_or_default(), open: replies, held }
    }

    pub(super) fn chunk<C>(&self, choice: C) -> Answer<'_, C> {
        // If usage is requested, OpenAI's chunks have `usage: null` except for the last.
        self.head.answer(vec![choice], self.has_usage.then_some(None))
    }

    /// Records the end of a reply. After the last reply, returns the usage
    /// (if requested) and `[DONE]`.
    pub(super) fn end<C: Serialize>(&mut self, usage: impl FnOnce() -> UsageBody) -> Vec<Event> {
        self.open -= 1;
        if self.open > 0 {
            return Vec::new();
        }
        let usage = usage();
        self.held.used(usage);
        let usage = self.has_usage.then(|| sse::json(&self.head.answer(Vec::<C>::new(), Some(Some(usage)))));
        usage.into_iter().chain([sse::done()]).collect()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.open == 0
    }
}

/// Encoder of reply events as chunks.
pub(super) trait ChunkEncoder: Send + 'static {
    /// Returns the chunks for one event of the reply with this index.
    fn encode(&mut self, index: usize, event: ChatEvent) -> Vec<Event>;

    /// Converts the error that ends the stream.
    fn failed(&self, error: ChatError) -> ApiError;

    /// Whether all replies have ended.
    fn has_ended(&self) -> bool;
}

/// Streams `first`, then the chunks of the replies. An error is sent as a separate
/// chunk, followed by `[DONE]`.
pub(super) fn stream(
    first: Vec<Event>,
    replies: Vec<Reply>,
    encoder: impl ChunkEncoder,
    keep_alive: Duration,
) -> Response {
    let replies = replies.into_iter().enumerate();
    let events = stream::select_all(replies.map(|(index, reply)| reply.map(move |event| (index, event))));
    let encoded = sse::encoded(events, encoder, |encoder, (index, event)| match event {
        Ok(event) => (encoder.encode(index, event), encoder.has_ended()),
        Err(error) => (vec![sse::json(&encoder.failed(error).body(Shape::OpenAi)), sse::done()], true),
    });
    sse::response(stream::iter(first).chain(encoded), keep_alive)
}
