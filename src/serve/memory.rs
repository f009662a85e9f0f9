//! Every byte of the device, as clients may watch it.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::State,
    http::Uri,
    response::{Response, sse::Event},
};
use bursar_actors::event::latest_of;
use futures_util::{Stream, StreamExt, stream};
use serde_json::{Value, json};
use tokio::{
    sync::Mutex,
    time::{Instant, Interval, MissedTickBehavior, interval},
};

use super::{
    error::ApiError,
    models::ModelState,
    query::{Fields, OF_DEVICE},
    service::{Served, Shared},
    sse,
};
use crate::{AskError, Events, Missed, Snapshot};

/// How often the snapshot is told to those who watch.
const EVERY: Duration = Duration::from_millis(500);
/// How old a snapshot may be that several are told: so thousands who watch cost no more than one.
const FRESH: Duration = Duration::from_millis(100);

/// The last snapshot that was told, and when it was made.
#[derive(Default)]
pub(super) struct LastTold(Mutex<Option<(Instant, Arc<str>)>>);

/// The snapshot of a runtime as JSON, made anew unless there is a fresh one.
pub(super) async fn told_text(shared: &Shared, served: &Served) -> Result<Arc<str>, ApiError> {
    let mut last = served.last_told.0.lock().await;
    if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
        return Ok(text.clone());
    }
    let text: Arc<str> = told(shared, served, served.runtime.budget().measure().await)?.to_string().into();
    *last = Some((Instant::now(), text.clone()));
    Ok(text)
}

/// `GET /v1/budget?device=NUMBER`: the ledger of one of the `devices`, by default the first, and how many requests each model
/// has, on whichever it is.
pub(super) async fn snapshot(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let served = Fields::of(&uri, OF_DEVICE)?.served(&shared)?;
    told(&shared, served, served.runtime.budget().snapshot().await).map(Json)
}

fn told(shared: &Shared, served: &Served, snapshot: Result<Snapshot, AskError>) -> Result<Value, ApiError> {
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

/// `GET /events`: the latest events of all devices, as `bursar top` reads them of a metrics server too.
pub(super) async fn latest(State(shared): State<Arc<Shared>>) -> Json<Vec<Value>> {
    let of = |served: &Served| (served.runtime.device().label(), served.runtime.recent_events());
    Json(latest_of(shared.served.iter().map(of)))
}

/// `GET /v1/budget/events?device=NUMBER`: `budget` twice a second as [`snapshot`] tells it, `event` for each that happens, first
/// the latest.
pub(super) async fn events(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Response, ApiError> {
    let fields = Fields::of(&uri, OF_DEVICE)?;
    let runtime = &fields.served(&shared)?.runtime;
    let mut looks = interval(EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (events, latest) = (runtime.events(), runtime.recent_events());
    let told = latest.last().map_or(0, |recorded| recorded.number);
    let keep_alive = shared.options.keep_alive;
    let latest = stream::iter(latest).map(|recorded| sse::named("event", &recorded));
    Ok(sse::response(latest.chain(watched(Watch { shared, fields, events, told, looks })), keep_alive))
}

struct Watch {
    shared: Arc<Shared>,
    fields: Fields,
    events: Events,
    /// The number of the last event that was told among the latest.
    told: u64,
    looks: Interval,
}

/// Ends when the server does, so that it need not wait for those who watch.
fn watched(watch: Watch) -> impl Stream<Item = Event> {
    stream::unfold(watch, |mut watch| async move {
        if watch.shared.is_ending() {
            return None;
        }
        let event = tokio::select! {
            _ = watch.looks.tick() => {
                let served = watch.fields.served(&watch.shared).ok()?;
                Event::default().event("budget").data(told_text(&watch.shared, served).await.ok()?)
            }
            event = watch.events.next() => match event {
                // It was told among the latest already: nothing for those who read.
                Some(Ok(recorded)) if recorded.number <= watch.told => Event::default().comment("told"),
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
