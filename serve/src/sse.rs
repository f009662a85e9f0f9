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

pub(super) fn json(value: &impl Serialize) -> Event {
    // Serialization cannot fail: the maps in these types have string keys.
    Event::default().json_data(value).unwrap_or_else(|error| Event::default().comment(error.to_string()))
}

/// Creates an event that is named after the `type` of its JSON, as in the APIs that name their
/// events.
pub(super) fn typed(event: &Value) -> Event {
    named(event["type"].as_str().unwrap_or_default(), event)
}

/// Creates an event with a name. The name precedes the data, because some clients do not look for a
/// name after the data.
pub(super) fn named(name: &str, value: &impl Serialize) -> Event {
    Event::default().event(name).json_data(value).unwrap_or_else(|error| Event::default().comment(error.to_string()))
}

/// The last event of OpenAI's streams.
pub(super) fn done() -> Event {
    Event::default().data("[DONE]")
}

/// Converts each item of `items` to events with `encode`, until `encode` returns that the
/// item was the last.
pub(super) fn encoded<H: Send, S: Send>(
    items: impl Stream<Item = H> + Send + Unpin,
    state: S,
    encode: impl Fn(&mut S, H) -> (Vec<Event>, bool) + Copy + Send + Sync,
) -> impl Stream<Item = Event> + Send {
    let events = stream::unfold((items, Some(state)), move |(mut items, state)| async move {
        let mut state = state?;
        loop {
            let (events, is_last) = encode(&mut state, items.next().await?);
            if is_last || !events.is_empty() {
                return Some((events, (items, (!is_last).then_some(state))));
            }
        }
    });
    events.flat_map(stream::iter)
}

/// Creates a response with these events. A stream without events for `keep_alive` gets a comment.
/// The stream is dropped when the client disconnects.
pub(super) fn response(events: impl Stream<Item = Event> + Send + 'static, keep_alive: Duration) -> Response {
    let alive = KeepAlive::new().interval(keep_alive).text("keep-alive");
    let mut response = Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(alive).into_response();
    // Without this header, nginx buffers the stream.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
