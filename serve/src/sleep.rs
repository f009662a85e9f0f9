//! `POST /sleep`, `POST /wake_up` and `GET /is_sleeping` as in vLLM, for one model or for all.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json,
    extract::State,
    http::Uri,
    response::{IntoResponse, Response},
};
use bursar::{Hint, SleepError, SleepLevel};
use serde_json::{Value, json};

use super::{
    error::ApiError,
    query::{Fields, OF_MODEL, OF_SLEEP},
    state::Shared,
};

/// Default of `within`: the time that running requests may take to finish. If they take longer,
/// the model stays awake.
const WITHIN: Duration = Duration::from_secs(600);

/// `POST /sleep?level=1&model=NAME&within=SECONDS`. vLLM has only `level`. Without
/// `model`, all models sleep.
pub(super) async fn sleep(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Response, ApiError> {
    let fields = Fields::of(&uri, OF_SLEEP)?;
    let level = fields.number("level")?.unwrap_or(1);
    let level = u8::try_from(level).ok().and_then(|level| SleepLevel::try_from(level).ok());
    let level = level.ok_or_else(|| {
        ApiError::invalid("level", "`level` is invalid; expected 1 or 2").hint("level 2 keeps no weights")
    })?;
    let within = fields.number("within")?.map_or(WITHIN, Duration::from_secs);
    for (_, model) in fields.models(&shared)? {
        model.sleep(level, within).await.map_err(refused)?;
    }
    Ok(().into_response())
}

/// `POST /wake_up?model=NAME`. Without a name, all models wake up.
pub(super) async fn wake_up(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Response, ApiError> {
    let fields = Fields::of(&uri, OF_MODEL)?;
    for (_, model) in fields.models(&shared)? {
        model.wake().await.map_err(refused)?;
    }
    Ok(().into_response())
}

/// `GET /is_sleeping?model=NAME`: returns whether the model (or every model) is asleep, and the
/// sleep level of each model.
pub(super) async fn is_sleeping(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let models = Fields::of(&uri, OF_MODEL)?.models(&shared)?;
    let levels = models.iter().map(|(name, model)| (name.clone(), model.is_asleep()));
    let levels: BTreeMap<String, Option<SleepLevel>> = levels.collect();
    let is_sleeping = !levels.is_empty() && levels.values().all(Option::is_some);
    Ok(Json(json!({"is_sleeping": is_sleeping, "levels": levels})))
}

fn refused(error: SleepError) -> ApiError {
    let message = error.to_string();
    let api = match error {
        SleepError::Stopped { .. } | SleepError::Unanswered(_) => ApiError::unavailable(message),
        _ => ApiError::busy(message),
    };
    api.hint(error.hint())
}
