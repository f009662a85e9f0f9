//! Routes that report device memory: the budget, its events, and a stream of both.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::State,
    http::Uri,
    response::{Response, sse::Event},
};
use bursar::{AskError, Events, Missed, Snapshot};
use bursar_actors::event::latest_of;
use futures_util::{Stream, StreamExt, stream};
use serde_json::{Value, json};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use super::{
    error::ApiError,
    models::ModelState,
    query::{Fields, OF_DEVICE},
    sse,
    state::{Served, Shared},
};

/// Interval between snapshots in a stream.
const EVERY: Duration = Duration::from_millis(500);
/// Maximum age of a snapshot that is sent to several clients. Thousands of clients then cost no
/// more than one client.
const FRESH: Duration = Duration::from_millis(100);

/// Snapshot of a runtime as JSON. A snapshot that is younger than `FRESH` is reused.
pub(super) async fn snapshot_text(shared: &Shared, served: &Served) -> Result<Arc<str>, ApiError> {
    let mut last = served.snapshot_cache.0.lock().await;
    if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
        return Ok(text.clone());
    }
    let text: Arc<str> = body_of(shared, served, served.runtime.budget().measure().await)?.to_string().into();
    *last = Some((Instant::now(), text.clone()));
    Ok(text)
}

/// `GET /v1/budget?device=NUMBER`: the ledger of one of the `devices` (the first by default), and
/// the number of requests of each model on any device.
pub(super) async fn snapshot(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let served = Fields::of(&uri, OF_DEVICE)?.served(&shared)?;
    body_of(&shared, served, served.runtime.budget().snapshot().await).map(Json)
}

fn body_of(shared: &Shared, served: &Served, snapshot: Result<Snapshot, AskError>) -> Result<Value, ApiError> {
    let snapshot = snapshot.map_err(|error| ApiError::unavailable(error.to_string()))?;
    let mut models = Vec::new();
    for entry in shared.models.all() {
        let requests = match &entry.state {
            ModelState::Ready(model) => Some(model.requests()),
            _ => None,
        };
        models.push(json!({
            "model": shared.models.shown(&entry),
            "state": entry.state.name(),
            "detail": entry.state.detail(),
            "requests": requests.map(|(taken, _)| taken),
            "requests_max": requests.map(|(_, limit)| limit),
        }));
    }
    let device = served.runtime.device();
    let devices: Vec<_> = shared.served.iter().map(|served| served.runtime.device().label()).collect();
    Ok(json!({
        "device": device.name(),
        "is_host_memory": device.is_host_memory(),
        "devices": devices,
        "budget": snapshot,
        "models": models,
    }))
}

/// `GET /events`: the latest events of all devices, in the format that `bursar top` also reads
/// from a metrics server.
pub(super) async fn latest(State(shared): State<Arc<Shared>>) -> Json<Vec<Value>> {
    let of = |served: &Served| (served.runtime.device().label(), served.runtime.recent_events());
    Json(latest_of(shared.served.iter().map(of)))
}

/// `GET /v1/budget/events?device=NUMBER`: server-sent events. A `budget` event with the JSON of
/// [`snapshot`] is sent twice a second. An event named `event` is sent for each event of the
/// runtime, starting with recent events from before the request.
pub(super) async fn events(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Response, ApiError> {
    let fields = Fields::of(&uri, OF_DEVICE)?;
    let runtime = &fields.served(&shared)?.runtime;
    let mut looks = interval(EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (events, latest) = (runtime.events(), runtime.recent_events());
    let last_sent = latest.last().map_or(0, |recorded| recorded.number);
    let keep_alive = shared.options.keep_alive;
    let latest = stream::iter(latest).map(|recorded| sse::named("event", &recorded));
    Ok(sse::response(latest.chain(watched(Watch { shared, fields, events, last_sent, looks })), keep_alive))
}

struct Watch {
    shared: Arc<Shared>,
    fields: Fields,
    events: Events,
    /// Number of the last event that was sent when the stream started.
    last_sent: u64,
    looks: Interval,
}

/// Stream of snapshots and events. The stream ends when the server shuts down, so that the shutdown
/// does not wait for clients that watch.
fn watched(watch: Watch) -> impl Stream<Item = Event> {
    stream::unfold(watch, |mut watch| async move {
        if watch.shared.is_ending() {
            return None;
        }
        let event = tokio::select! {
            _ = watch.looks.tick() => {
                let served = watch.fields.served(&watch.shared).ok()?;
                Event::default().event("budget").data(snapshot_text(&watch.shared, served).await.ok()?)
            }
            event = watch.events.next() => match event {
                // The event was already sent at the start. Clients ignore comments.
                Some(Ok(recorded)) if recorded.number <= watch.last_sent => Event::default().comment("sent before"),
                Some(Ok(recorded)) => sse::named("event", &recorded),
                Some(Err(missed)) => missed_event(missed),
                None => return None,
            },
        };
        Some((event, watch))
    })
}

fn missed_event(missed: Missed) -> Event {
    sse::named("event", &json!({"event": "missed", "detail": missed.to_string()}))
}
