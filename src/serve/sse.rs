//! Server-sent events.

use std::{convert::Infallible, time::Duration};

use axum::{
    http::HeaderValue,
    response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
};
use futures_util::{Stream, StreamExt, stream};
use serde::Serialize;
use serde_json::Value;

/// An event with this JSON.
pub(super) fn json(value: &impl Serialize) -> Event {
    // Of our own types, whose maps have strings as keys.
    Event::default().json_data(value).unwrap_or_else(|error| Event::default().comment(error.to_string()))
}

/// An event with the name that its JSON has as `type`. The name comes first, as the APIs send it that have names.
pub(super) fn typed(told: &Value) -> Event {
    named(told["type"].as_str().unwrap_or_default(), told)
}

/// An event of this name with this JSON. The name comes first: some clients read no further back.
pub(super) fn named(name: &str, value: &impl Serialize) -> Event {
    Event::default().event(name).json_data(value).unwrap_or_else(|error| Event::default().comment(error.to_string()))
}

/// The last event of OpenAI's streams.
pub(super) fn done() -> Event {
    Event::default().data("[DONE]")
}

/// The events that are told of what is heard, until `tell` says that it was the last.
pub(super) fn told<H: Send, S: Send>(
    heard: impl Stream<Item = H> + Send + Unpin,
    state: S,
    tell: impl Fn(&mut S, H) -> (Vec<Event>, bool) + Copy + Send + Sync,
) -> impl Stream<Item = Event> + Send {
    let events = stream::unfold((heard, Some(state)), move |(mut heard, state)| async move {
        let mut state = state?;
        loop {
            let (events, is_last) = tell(&mut state, heard.next().await?);
            if is_last || !events.is_empty() {
                return Some((events, (heard, (!is_last).then_some(state))));
            }
        }
    });
    events.flat_map(stream::iter)
}

/// An answer of these events. A silent stream gets a comment now and then. It is dropped when the client leaves.
pub(super) fn response(events: impl Stream<Item = Event> + Send + 'static, keep_alive: Duration) -> Response {
    let alive = KeepAlive::new().interval(keep_alive).text("keep-alive");
    let mut response = Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(alive).into_response();
    // nginx holds streams back otherwise.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
