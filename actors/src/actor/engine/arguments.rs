//! Arguments of an engine, its names as an owner of leases, and the publication of its status and
//! restarts.

use std::sync::Arc;

use bursar_budgets::{Device, Label, Owner};
use bursar_model::checkpoint::CheckpointOrigin;

use super::{LoadOptions, ProgressSink, RetainedState, Status, StatusBoard, WeightStore};
use crate::{
    budget::Budget, event::Event, metric, profile::ATTEMPTS_MAX, sleep::Wakefulness, token_interval::GpuLoad,
    tree::Role,
};

#[derive(Clone)]
pub struct EngineArguments {
    pub label: Label,
    pub source: CheckpointOrigin,
    pub options: LoadOptions,
    pub budget: Budget,
    pub device: Arc<dyn Device>,
    /// Load of the GPU, by this model and all other models.
    pub card: Arc<GpuLoad>,
    /// Weights, lanes and kernels, which outlive this engine.
    pub weight_store: WeightStore,
    /// State that earlier engines of the model left behind. A start that wakes the model reuses it
    /// instead of computing it again.
    pub kept: RetainedState,
    /// The model's sleep state: awake, or being woken by this engine.
    pub wakefulness: Wakefulness,
    /// The number of this engine. The runtime gives each engine a new, larger number.
    pub generation: u64,
    /// Publishes the model's status to its handles.
    pub status: Arc<StatusBoard>,
    /// Callback to which each step of the start is reported.
    pub progress: ProgressSink,
}

impl EngineArguments {
    /// Publishes `next` to handles and event listeners, unless a final status was published
    /// earlier.
    pub(crate) fn show(&self, next: Status) {
        let model = self.label.clone();
        let event = match &next {
            Status::Starting | Status::NotWoken(_) => None,
            Status::Ready(serving) => Some(Event::Ready { model, kv_tokens: serving.kv_tokens }),
            Status::Failed(error) => Some(Event::Failed { model, reason: error.to_string() }),
            Status::Stopped { reason } => Some(Event::Stopped { model, reason: reason.to_string() }),
        };
        if self.status.change(next) {
            event.into_iter().for_each(|event| self.budget.record(event));
        }
    }

    /// Reports that a successor of a dead actor will start.
    pub(crate) fn report_restart(&self, actor: Role, reason: &str) {
        metric::RESTARTS_TOTAL.add(&(self.label.clone(), actor), 1);
        let (model, actor, reason) = (Some(self.label.clone()), actor.name(), reason.to_owned());
        self.budget.record(Event::Restart { model, actor, reason });
    }

    /// The owner of the leases of an attempt. Serving uses the same leases.
    pub(super) fn owner(&self, attempt: u32) -> Owner {
        let generation = self.generation * u64::from(ATTEMPTS_MAX) + u64::from(attempt);
        Owner::new(format!("{} engine", self.label), generation)
    }

    /// The generation of the serving actors that start number `start` creates: the number of the
    /// engine in the upper 32 bits, and `start` in the lower 32 bits.
    pub(crate) fn serving_generation(&self, start: u64) -> u64 {
        self.generation << 32 | start
    }

    /// The owner of this engine's last possible attempt. Clearing that owner also clears the owners
    /// of all earlier attempts. The weights have a separate owner and are not affected.
    pub(crate) fn last_owner(&self) -> Owner {
        self.owner(ATTEMPTS_MAX - 1)
    }

    /// The owner of the host memory that pictures are decoded in.
    pub(crate) fn vision_owner(&self) -> Owner {
        Owner::new(format!("{} vision", self.label), self.generation)
    }

    /// The owner of the host memory that holds the weights while the model sleeps.
    pub(crate) fn sleep_owner(&self) -> Owner {
        Owner::new(format!("{} sleep", self.label), self.generation)
    }
}
