//! Health of a runtime and its models, for process supervisors and load balancers.

use std::collections::BTreeMap;

use serde::Serialize;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Whether the runtime supervisor answers within a second. A supervisor that does not answer
    /// can only be replaced by a new runtime, which in most programs means a new process.
    pub is_live: bool,
    /// The health of each model, by name. A model that did not start has no entry.
    pub models: BTreeMap<String, ModelHealth>,
}

/// Combines the health of several runtimes. The result is live if all runtimes are live, and lists
/// the models of all runtimes.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelHealth {
    /// The model is being loaded, sized or woken, or dead actors are being replaced. Requests wait.
    Starting,
    /// The model takes requests.
    Ready,
    /// The model holds no device memory. The next request wakes it and waits until it is awake.
    Asleep,
    /// The model is being unloaded. Running requests may finish, and new ones are refused.
    Leaving,
    /// The model was ready and then ended by itself. Load it again to send it requests. Unloading
    /// it removes this entry.
    Stopped,
}

impl Health {
    /// Whether there is at least one model and all models take requests. A sleeping model counts as
    /// ready, because it wakes up for a request.
    pub fn is_ready(&self) -> bool {
        let is_ready = |model: &ModelHealth| matches!(model, ModelHealth::Ready | ModelHealth::Asleep);
        self.is_live && !self.models.is_empty() && self.models.values().all(is_ready)
    }
}
