//! A stream of chunks about several replies at once.

use std::time::Duration;

use axum::response::{Response, sse::Event};
use futures_util::{StreamExt, stream};
use serde::Serialize;

use super::{
    head::{Answer, Head},
    sampling::StreamOptions,
    usage::UsageTold,
};
use crate::{
    ChatEvent, Reply,
    serve::{
        error::{ApiError, Shape},
        guard::Held,
        sse,
    },
};

/// What all chunks of a stream have in common.
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
        // OpenAI's chunks have a null where the last one has the usage.
        self.head.answer(vec![choice], self.has_usage.then_some(None))
    }

    /// One of the replies has ended. After the last: the usage if asked for, and `[DONE]`.
    pub(super) fn end<C: Serialize>(&mut self, usage: impl FnOnce() -> UsageTold) -> Vec<Event> {
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

/// What tells of the replies' events.
pub(super) trait ChunkEncoder: Send + 'static {
    /// The chunks of one event of the reply of this index.
    fn told(&mut self, index: usize, event: ChatEvent) -> Vec<Event>;

    /// Whether all replies have ended.
    fn has_ended(&self) -> bool;
}

/// These events, then what is told of the replies. An error in the middle is a chunk of its own, the last but one.
pub(super) fn stream(
    first: Vec<Event>,
    replies: Vec<Reply>,
    encoder: impl ChunkEncoder,
    keep_alive: Duration,
) -> Response {
    let replies = replies.into_iter().enumerate();
    let heard = stream::select_all(replies.map(|(index, reply)| reply.map(move |event| (index, event))));
    let told = sse::told(heard, encoder, |encoder, (index, event)| match event {
        Ok(event) => (encoder.told(index, event), encoder.has_ended()),
        Err(error) => (vec![sse::json(&ApiError::from(error).body(Shape::OpenAi)), sse::done()], true),
    });
    sse::response(stream::iter(first).chain(told), keep_alive)
}
