//! Whether a runtime lives, and whether its models take requests: for whoever restarts a process or sends it work.

use std::collections::BTreeMap;

use serde::Serialize;

/// How a runtime is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Its supervisor answers within a second. If not, only another runtime helps: in most programs, another process.
    pub is_live: bool,
    /// Each model by its name; one that did not start is none.
    pub models: BTreeMap<String, ModelHealth>,
}

/// How a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelHealth {
    /// It is loaded and sized, or those of its actors that died are replaced: requests wait.
    Starting,
    /// It takes requests.
    Ready,
    /// It is being unloaded: requests under way may go on, and new ones are refused.
    Leaving,
    /// It was ready and has ended by itself. Loading it again helps; unloading it forgets it.
    Stopped,
}

impl Health {
    /// Whether there is a model, and all there are take requests.
    pub fn is_ready(&self) -> bool {
        let is_ready = |model: &ModelHealth| *model == ModelHealth::Ready;
        self.is_live && !self.models.is_empty() && self.models.values().all(is_ready)
    }
}
