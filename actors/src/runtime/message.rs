//! What may be asked of the runtime supervisor.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bursar_budgets::{Device, DeviceError};
use bursar_model::checkpoint::CheckpointOrigin;
use ractor::ActorCell;

use super::Health;
use crate::{
    chat::ModelHandle,
    engine::{LoadOptions, ProgressSink, StartError},
    responder::Responder,
    supervise::FaultInjection,
};

/// Called when every byte of a model is home, with how many requests were cut off.
pub type Home = Box<dyn FnOnce(usize) + Send>;

/// Whom the runtime supervises, to link to, watch, or kill.
#[derive(Clone, Debug)]
pub struct Supervised {
    /// The budget actor.
    pub budget: ActorCell,
    /// The engine of each model.
    pub engines: BTreeMap<String, ActorCell>,
}

/// From users, few and far between, and from itself.
pub enum RuntimeMessage {
    /// Load a model; answered when it is READY or has failed.
    Load {
        /// Its name.
        name: String,
        /// Its files.
        source: CheckpointOrigin,
        /// Its limits.
        options: Box<LoadOptions>,
        /// Who watches.
        progress: ProgressSink,
        /// A handle.
        reply: Responder<Result<ModelHandle, Arc<StartError>>>,
    },
    /// How it is; see [`crate::tree::HEALTH`].
    Health(Responder<Health>),
    /// End a model; answered when every byte that it had is home. Unknown names are nobody's loss.
    Unload {
        /// Its name.
        name: String,
        /// What requests under way may still take.
        within: Duration,
        /// All is home; so many requests were cut off.
        reply: Responder<usize>,
    },
    /// Who is supervised now.
    Supervised(Responder<Supervised>),
    /// A model did not start, or nobody waits for it any more: end it.
    Forget {
        /// Its name.
        name: String,
        /// Which model of that name.
        load: u64,
        /// Called when every byte that it had is home.
        home: Home,
    },
    /// What a dead engine had is home, and the wait is over.
    Respawn {
        /// Its name.
        name: String,
        /// Which model of that name.
        load: u64,
    },
    /// What an ended model had is home.
    Ended {
        /// Its name.
        name: String,
        /// Which model of that name.
        load: u64,
    },
    /// Somebody heard that the device is lost.
    DeviceLost,
    /// What was on the device that was lost has ended, and another is there, or not.
    DeviceMade(Result<Arc<dyn Device>, DeviceError>),
    /// The wait before the budget starts again is over.
    RespawnBudget,
    /// What a model's requests may still take has passed, or they have ended.
    Due {
        /// Its name.
        name: String,
        /// Which model of that name.
        load: u64,
    },
    /// End every model, then the runtime; answered when every byte is home.
    ShutDown {
        /// What requests under way may still take.
        within: Duration,
        /// All is home; so many requests were cut off.
        reply: Responder<usize>,
    },
    /// Set the gauges again: from itself, for a recorder that has come since.
    Show,
    /// Die of this.
    InjectFault(FaultInjection),
}
