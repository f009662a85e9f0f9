//! Drill on a host device: simulates another process that takes memory and later frees it.

use bursar_budgets::testing::HostControl;
use std::{sync::Arc, time::Duration};

use axum::{Json, extract::State, http::Uri};
use bursar::{Bytes, HostDevice};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep_until};

use super::{
    body::{self, FromJson, JsonBody},
    error::ApiError,
    query::{Fields, OF_DEVICE},
    state::Shared,
};

/// Longest duration of a drill, in seconds.
const SECONDS_MAX: u64 = 60;

/// Body of `POST /v1/budget/other_process`.
#[derive(Deserialize, JsonSchema)]
pub(super) struct Drill {
    bytes: u64,
    seconds: u64,
}

impl FromJson for Drill {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        body::parsed(bytes)
    }
}

/// Bytes that the simulated process holds.
#[derive(Serialize, JsonSchema)]
pub(super) struct Taken {
    bytes: u64,
}

/// `GET /v1/budget/other_process?device=NUMBER`.
pub(super) async fn shown(State(shared): State<Arc<Shared>>, uri: Uri) -> Result<Json<Taken>, ApiError> {
    Ok(Json(Taken { bytes: stand_in(&shared, &uri)?.counts().foreign.0 }))
}

/// `POST /v1/budget/other_process?device=NUMBER`: takes free memory, up to `bytes`, and frees it
/// after `seconds`. Only one drill runs at a time.
pub(super) async fn drill(
    State(shared): State<Arc<Shared>>,
    uri: Uri,
    body: JsonBody<Drill>,
) -> Result<Json<Taken>, ApiError> {
    let device = stand_in(&shared, &uri)?;
    let Drill { bytes, seconds } = body.value;
    if seconds > SECONDS_MAX {
        return Err(ApiError::invalid("seconds", format!("`seconds` is {seconds}; expected at most {SECONDS_MAX}")));
    }
    let turn = shared.other_process.clone().try_lock_owned();
    let turn = turn.map_err(|_| ApiError::full("another drill is running").hint("wait until it has ended"))?;
    let taken = device.foreign_takes(Bytes(bytes));
    let until = Instant::now() + Duration::from_secs(seconds);
    tokio::spawn(async move {
        sleep_until(until).await;
        device.foreign_gives_back(taken);
        drop(turn);
    });
    Ok(Json(Taken { bytes: taken.0 }))
}

fn stand_in(shared: &Shared, uri: &Uri) -> Result<Arc<HostDevice>, ApiError> {
    let none = || ApiError::not_found("this drill works only on a host device, but the device is a GPU");
    Fields::of(uri, OF_DEVICE)?.served(shared)?.runtime.device().as_host().ok_or_else(none)
}
