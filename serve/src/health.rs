//! Health, readiness, metrics and version routes.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use bursar::{Health, ModelHealth};
use futures_util::future::join_all;
use serde_json::{Map, Value, json};

use super::vllm_series::with_vllm_names;
use super::{
    error::ApiError,
    models::{Entry, ModelState},
    state::Shared,
};

/// Returns 200 while all models are ready or asleep and the server is not shutting down. Returns
/// 503 otherwise. Models that failed to load are ignored, unless no other model exists.
pub(super) async fn ready(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    answer(&shared, &headers, |live, ready| live && ready).await
}

/// Returns 200 while all runtimes are alive, and otherwise 503. A dead runtime comes back only
/// when the process is restarted.
pub(super) async fn live(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    answer(&shared, &headers, |live, _| live).await
}

async fn answer(shared: &Shared, headers: &HeaderMap, is_well: impl Fn(bool, bool) -> bool) -> Response {
    let all = join_all(shared.served.iter().map(|served| served.runtime.health())).await;
    let health: Health = all.into_iter().collect();
    let entries = shared.models.all();
    // The reason for a failure may contain paths on the server, so only clients with a
    // valid key see it.
    let is_client = shared.is_client(headers);
    let mut models = Map::new();
    // A failed model is shown, but does not make the server unready.
    let mut is_ready = entries.iter().any(Entry::is_listed) && !shared.is_ending();
    for entry in entries {
        let now = health.models.get(&own_name(&entry.state).unwrap_or_default()).copied();
        let (state, detail) = match (&entry.state, now) {
            (ModelState::Ready(_), Some(ModelHealth::Ready)) => ("ready", None),
            (ModelState::Ready(_), Some(ModelHealth::Starting)) => ("restarting", None),
            (ModelState::Ready(_), Some(ModelHealth::Asleep)) => ("asleep", None),
            (ModelState::Ready(_), _) => ("stopped", None),
            (state, _) => (state.name(), state.detail().map(str::to_owned)),
        };
        is_ready &= matches!(state, "ready" | "asleep") || !entry.is_listed();
        models.insert(shared.models.shown(&entry), json!({"state": state, "detail": detail.filter(|_| is_client)}));
    }
    let status = if is_well(health.is_live, is_ready) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({"live": health.is_live, "ready": is_ready, "ending": shared.is_ending(), "models": models});
    (status, Json(body)).into_response()
}

/// Name of the model in the runtime, which may differ from the names that clients use.
fn own_name(state: &ModelState) -> Option<String> {
    match state {
        ModelState::Ready(model) => Some(model.name()),
        _ => None,
    }
}

/// `GET /metrics` in the Prometheus text format.
pub(super) async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let Some(metrics) = &shared.metrics else { return no_metrics().await };
    // Measure each device, so that the metrics of an idle device are current. Concurrent
    // scrapers share one measurement.
    for served in &shared.served {
        drop(super::memory::snapshot_text(&shared, served).await);
    }
    let kind = (axum::http::header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8");
    let text = metrics.render();
    let text = if shared.options.vllm_metrics { with_vllm_names(text) } else { text };
    ([kind], text).into_response()
}

pub(super) async fn no_metrics() -> Response {
    ApiError::not_found("this process has no Bursar metrics recorder").into_response()
}

pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION"), "server": "bursar"}))
}
