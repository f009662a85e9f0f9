//! Query strings of requests.

use std::collections::BTreeMap;

use axum::{extract::Query, http::Uri};
use bursar::ModelHandle;

use super::{
    error::ApiError,
    models::{ModelState, shortened},
    state::{Served, Shared},
};

/// Parameters of the budget routes.
pub(super) const OF_DEVICE: &[&str] = &["device"];
/// Parameters of `/wake_up` and `/is_sleeping`. Without `model`, they apply to all models.
pub(super) const OF_MODEL: &[&str] = &["model"];
/// Parameters of the route `/sleep`.
pub(super) const OF_SLEEP: &[&str] = &["level", "model", "within"];

pub(super) struct Fields(BTreeMap<String, String>);

impl Fields {
    pub(super) fn of(uri: &Uri, known: &[&str]) -> Result<Self, ApiError> {
        let wrong = |_| ApiError::invalid("query", "the query string is not a list of names and values");
        let Query(fields) = Query::<BTreeMap<String, String>>::try_from_uri(uri).map_err(wrong)?;
        match fields.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(Fields(fields)),
            Some(name) => {
                let name = shortened(name);
                let message = format!("unknown query parameter `{name}`");
                Err(ApiError::invalid(name, message).hint(format!("expected one of: {}", known.join(", "))))
            }
        }
    }

    pub(super) fn number(&self, name: &'static str) -> Result<Option<u64>, ApiError> {
        let wrong = |_| ApiError::invalid(name, format!("`{name}` is not a whole number"));
        self.0.get(name).map(|value| value.parse().map_err(wrong)).transpose()
    }

    /// The model that `model` names, or all models that are ready.
    pub(super) fn models(&self, shared: &Shared) -> Result<Vec<(String, ModelHandle)>, ApiError> {
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

    /// The runtime whose index is `device` (from 0), or the first runtime.
    pub(super) fn served<'s>(&self, shared: &'s Shared) -> Result<&'s Served, ApiError> {
        let number = self.number("device")?.unwrap_or(0);
        let served = usize::try_from(number).ok().and_then(|number| shared.served.get(number));
        served.ok_or_else(|| {
            let message = format!("device {number} does not exist");
            let last = shared.served.len() - 1;
            ApiError::invalid("device", message)
                .hint(format!("expected 0 to {last}; `devices` of /v1/budget lists the devices"))
        })
    }
}
