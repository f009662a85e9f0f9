//! `POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, as vLLM has them, for one model or for all.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Query, State},
    http::Uri,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    error::ApiError,
    models::{ModelState, shortened},
    service::Shared,
};
use crate::{Hint, ModelHandle, SleepError, SleepLevel};

/// How long running requests may take before the model stays awake instead, unless `within` says otherwise.
const WITHIN: Duration = Duration::from_secs(600);

/// `POST /sleep?level=1&model=NAME&within=SECONDS`. vLLM has `level` alone. All models sleep if none is named.
pub(super) async fn sleep(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Response, ApiError> {
    let fields = Fields::of(&uri, &["level", "model", "within"])?;
    let level = fields.number("level")?.unwrap_or(1);
    let level = u8::try_from(level).ok().and_then(|level| SleepLevel::try_from(level).ok());
    let level = level.ok_or_else(|| ApiError::invalid("level", "`level` is 1 or 2").hint("2 keeps no weights"))?;
    let within = fields.number("within")?.map_or(WITHIN, Duration::from_secs);
    for (_, model) in fields.models(&shared)? {
        model.sleep(level, within).await.map_err(told)?;
    }
    Ok(().into_response())
}

/// `POST /wake_up?model=NAME`.
pub(super) async fn wake_up(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Response, ApiError> {
    let fields = Fields::of(&uri, &["model"])?;
    for (_, model) in fields.models(&shared)? {
        model.wake().await.map_err(told)?;
    }
    Ok(().into_response())
}

/// `GET /is_sleeping?model=NAME`: whether it sleeps, or all do, and each with its level.
pub(super) async fn is_sleeping(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let models = Fields::of(&uri, &["model"])?.models(&shared)?;
    let levels = models.iter().map(|(name, model)| (name.clone(), model.is_asleep()));
    let levels: BTreeMap<String, Option<SleepLevel>> = levels.collect();
    let is_sleeping = !levels.is_empty() && levels.values().all(Option::is_some);
    Ok(Json(json!({"is_sleeping": is_sleeping, "levels": levels})))
}

/// The fields of a query.
struct Fields(BTreeMap<String, String>);

impl Fields {
    fn of(uri: &Uri, known: &[&str]) -> Result<Self, ApiError> {
        let wrong = |_| ApiError::invalid("query", "the query is not a list of names and values");
        let Query(fields) = Query::<BTreeMap<String, String>>::try_from_uri(uri).map_err(wrong)?;
        match fields.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(Fields(fields)),
            Some(name) => {
                let name = shortened(name);
                let told = format!("`{name}` is not taken here");
                Err(ApiError::invalid(name, told).hint(format!("taken are: {}", known.join(", "))))
            }
        }
    }

    fn number(&self, name: &'static str) -> Result<Option<u64>, ApiError> {
        let wrong = |_| ApiError::invalid(name, format!("`{name}` is a whole number"));
        self.0.get(name).map(|value| value.parse().map_err(wrong)).transpose()
    }

    /// The named model, or all that have been loaded.
    fn models(&self, shared: &Shared) -> Result<Vec<(String, ModelHandle)>, ApiError> {
        match self.0.get("model") {
            Some(name) => shared.models.ready(Some(name)).map(|model| vec![model]),
            None => Ok(shared
                .models
                .all()
                .into_iter()
                .filter_map(|entry| match entry.state {
                    ModelState::Ready(model) => Some((entry.names[0].clone(), model)),
                    _ => None,
                })
                .collect()),
        }
    }
}

fn told(error: SleepError) -> ApiError {
    let told = error.to_string();
    let api = match error {
        SleepError::Stopped { .. } | SleepError::Unanswered(_) => ApiError::unavailable(told),
        _ => ApiError::busy(told),
    };
    api.hint(error.hint())
}
