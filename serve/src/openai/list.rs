//! `GET /v1/models`.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Path, State},
};
use bursar::ModelFacts;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    error::ApiError,
    models::{Entry, ModelState},
    state::Shared,
};

/// How long a list waits for a model's facts.
const PATIENCE: Duration = Duration::from_millis(500);

pub(crate) async fn all(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let mut data = Vec::new();
    for entry in shared.models.all().into_iter().filter(Entry::is_listed) {
        let facts = facts(&entry).await;
        data.extend(entry.names.iter().map(|name| entry_of(&entry, name, facts.as_ref())));
    }
    Json(json!({"object": "list", "data": data}))
}

pub(crate) async fn one(State(shared): State<Arc<Shared>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let entry = shared.models.listed(&name)?;
    Ok(Json(entry_of(&entry, &name, facts(&entry).await.as_ref())))
}

/// Returns the model's facts. Returns `None` while the model is loading, and if the model does not
/// answer within `PATIENCE`, for example while it restarts.
async fn facts(entry: &Entry) -> Option<ModelFacts> {
    let ModelState::Ready(model) = &entry.state else { return None };
    timeout(PATIENCE, model.facts()).await.ok()?.ok()
}

/// Returns OpenAI's fields, vLLM's `root` and `max_model_len`, and the state of the model.
fn entry_of(entry: &Entry, name: &str, facts: Option<&ModelFacts>) -> Value {
    let tokens = facts.map(|facts| facts.context_tokens);
    let pictures = facts.map(|facts| facts.pictures);
    json!({
        "id": name, "object": "model", "created": entry.created, "owned_by": "bursar", "root": entry.names[0],
        "parent": null, "max_model_len": tokens, "state": entry.state.name(), "detail": entry.state.detail(),
        "pictures": pictures,
    })
}
