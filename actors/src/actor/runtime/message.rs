//! Messages of the runtime supervisor.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bursar_budgets::{Device, DeviceError};
use bursar_model::checkpoint::CheckpointOrigin;
use ractor::ActorCell;

use super::Health;
use crate::{
    chat::ModelHandle,
    engine::{LoadOptions, ProgressSink, StartError},
    responder::Responder,
    sleep::{SleepError, SleepLevel, SleepOrder},
    supervise::FaultInjection,
};

/// Called with the number of requests that were cut off, once all memory of a model is returned.
pub type OnReleased = Box<dyn FnOnce(usize) + Send>;

pub struct LoadRequest {
    /// Source of the model's files.
    pub source: CheckpointOrigin,
    pub options: LoadOptions,
    /// Called for each step of the start.
    pub progress: ProgressSink,
    /// Receives a handle to the model, or the reason why it did not start.
    pub reply: Responder<Result<ModelHandle, Arc<StartError>>>,
}

/// The actors that a runtime supervises, to link to, watch or kill.
#[derive(Clone, Debug)]
pub struct Supervised {
    pub budget: ActorCell,
    /// The engine of each model, by the model's name.
    pub engines: BTreeMap<String, ActorCell>,
}

/// Messages from users, which are rare, and from the supervisor itself.
pub enum RuntimeMessage {
    /// Loads a model. Answered when the model is READY or has failed.
    Load {
        name: String,
        /// The model to load, and the callbacks for its start.
        order: Box<LoadRequest>,
    },
    /// Asks for the health; see [`crate::tree::HEALTH`].
    Health(Responder<Health>),
    /// Ends a model. Answered when all its memory is returned. An unknown name is ignored.
    Unload {
        name: String,
        /// How long running requests may still take.
        within: Duration,
        /// Receives the number of requests that were cut off, once all memory is returned.
        reply: Responder<usize>,
    },
    /// Asks for the actors that are supervised now.
    Supervised(Responder<Supervised>),
    /// Ends a model that did not start, or whose loader no longer waits for it.
    Forget {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
        /// Called when all memory of the model is returned.
        on_released: Option<OnReleased>,
    },
    /// The memory of a dead engine is returned and the wait is over, so its successor starts.
    Respawn {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
        /// The number of the death. The engine may have been replaced since.
        death: u64,
    },
    /// All memory of an ended model is returned.
    Ended {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
        /// Number of requests that were running when the model began to end.
        cut_off: usize,
    },
    /// The budget found the device lost.
    DeviceLost,
    /// Everything on the lost device has ended. Contains the successor of the device, or the reason
    /// why there is no successor.
    DeviceMade(Result<Arc<dyn Device>, DeviceError>),
    /// The wait before the budget restarts is over.
    RespawnBudget {
        /// The number of the death. The budget may have been replaced since.
        death: u64,
    },
    /// The running requests of a model have ended, or their deadline has passed.
    Due {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
    },
    /// Ends every model, then the runtime. Answered when all memory is returned.
    ShutDown {
        /// How long running requests may still take.
        within: Duration,
        /// Receives the number of requests that were cut off, once all memory is returned.
        reply: Responder<usize>,
    },
    /// A sleep or wake order from a model's handle.
    SleepOrder {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
        order: SleepOrder,
    },
    /// The requests of a model that is going to sleep have ended, or it stays awake.
    Drained {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
        /// `Ok` if the requests have ended, otherwise the reason why the model stays awake.
        drained: Result<(), SleepError>,
    },
    /// All device memory of a model that is going to sleep is returned.
    FellAsleep {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
        /// The sleep level, which says whether host memory holds the weights.
        level: SleepLevel,
    },
    /// A model is READY after its load or after its sleep.
    Woken {
        name: String,
        /// The load number. Another model may have this name by now.
        load: u64,
    },
    /// Checks for models that should be put to sleep.
    CheckIdle,
    /// Sets the gauges again and checks for idle models. The supervisor sends this message to
    /// itself regularly, so that a recorder that was installed later has all gauges.
    Show,
    /// Fails the supervisor on purpose.
    InjectFault(FaultInjection),
}
