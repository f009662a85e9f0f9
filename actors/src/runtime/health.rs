//! Whether a runtime is alive and its models take requests, for process supervisors and load balancers.

use std::collections::BTreeMap;

use serde::Serialize;

/// The health of a runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The supervisor answers within a second. If not, only another runtime helps; in most programs, another process.
    pub is_live: bool,
    /// The health of each model, by name. A model that did not start has no entry.
    pub models: BTreeMap<String, ModelHealth>,
}

/// The health of several runtimes as one: alive while each is, with the models of all.
impl FromIterator<Health> for Health {
    fn from_iter<I: IntoIterator<Item = Health>>(all: I) -> Self {
        let whole = Health { is_live: true, ..Health::default() };
        all.into_iter().fold(whole, |mut whole, Health { is_live, models }| {
            whole.is_live &= is_live;
            whole.models.extend(models);
            whole
        })
    }
}

/// The health of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelHealth {
    /// It is being loaded and sized, or dead actors are being replaced. Requests wait.
    Starting,
    /// It takes requests.
    Ready,
    /// It holds no device memory. The next request wakes it and waits for it.
    Asleep,
    /// It is being unloaded. Running requests may finish, and new ones are refused.
    Leaving,
    /// It was ready and has ended by itself. Loading it again helps. Unloading it removes this entry.
    Stopped,
}

impl Health {
    /// Whether there is at least one model and all models take requests. Those that sleep do: they wake up for them.
    pub fn is_ready(&self) -> bool {
        let is_ready = |model: &ModelHealth| matches!(model, ModelHealth::Ready | ModelHealth::Asleep);
        self.is_live && !self.models.is_empty() && self.models.values().all(is_ready)
    }
}
