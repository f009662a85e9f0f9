//! What the runtime supervisor can be asked.

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

/// Called with the number of requests cut off, when all memory of a model is back.
pub type OnReleased = Box<dyn FnOnce(usize) + Send>;

/// A model to load.
pub struct LoadRequest {
    /// Where its files come from.
    pub source: CheckpointOrigin,
    /// Its limits and other options.
    pub options: LoadOptions,
    /// Called for each step of the start.
    pub progress: ProgressSink,
    /// A handle to the model, or why it did not start.
    pub reply: Responder<Result<ModelHandle, Arc<StartError>>>,
}

/// The actors that a runtime supervises, to link to, watch or kill.
#[derive(Clone, Debug)]
pub struct Supervised {
    /// The budget actor.
    pub budget: ActorCell,
    /// The engine of each model, by the model's name.
    pub engines: BTreeMap<String, ActorCell>,
}

/// Messages from users, which are rare, and from the supervisor itself.
pub enum RuntimeMessage {
    /// Loads a model. Answered when it is READY or has failed.
    Load {
        /// The model's name.
        name: String,
        /// What is loaded, and who is told of it.
        order: Box<LoadRequest>,
    },
    /// Asks for the health; see [`crate::tree::HEALTH`].
    Health(Responder<Health>),
    /// Ends a model. Answered when all its memory is back. An unknown name is ignored.
    Unload {
        /// The model's name.
        name: String,
        /// How long running requests may still take.
        within: Duration,
        /// The number of requests cut off, once all memory is back.
        reply: Responder<usize>,
    },
    /// Asks for the actors supervised now.
    Supervised(Responder<Supervised>),
    /// Ends a model that did not start, or that its loader no longer waits for.
    Forget {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
        /// Called when all its memory is back.
        on_released: Option<OnReleased>,
    },
    /// A dead engine's memory is back and the wait is over: start its successor.
    Respawn {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
        /// The number of the death; the engine may have been replaced since.
        death: u64,
    },
    /// All memory of an ended model is back.
    Ended {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
        /// Requests that ran when it began to end.
        cut_off: usize,
    },
    /// The budget found the device lost.
    DeviceLost,
    /// Everything on the lost device has ended. Carries its successor, or why there is none.
    DeviceMade(Result<Arc<dyn Device>, DeviceError>),
    /// The wait before the budget restarts is over.
    RespawnBudget {
        /// The number of the death; the budget may have been replaced since.
        death: u64,
    },
    /// A model's running requests have ended, or their time is up.
    Due {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
    },
    /// Ends every model, then the runtime. Answered when all memory is back.
    ShutDown {
        /// How long running requests may still take.
        within: Duration,
        /// The number of requests cut off, once all memory is back.
        reply: Responder<usize>,
    },
    /// What a model's handle asks for.
    SleepOrder {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
        /// What is asked for.
        order: SleepOrder,
    },
    /// The requests of a model that falls asleep have ended, or why it stays awake.
    Drained {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
        /// Whether they have ended.
        drained: Result<(), SleepError>,
    },
    /// All device memory of a model that falls asleep is back.
    FellAsleep {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
        /// What became of its weights.
        level: SleepLevel,
    },
    /// A model is READY after its load, or after it slept.
    Woken {
        /// The model's name.
        name: String,
        /// The load number; another model of this name may exist by now.
        load: u64,
    },
    /// Looks for models that are to sleep.
    CheckIdle,
    /// Sets the gauges again, and looks. The supervisor sends this to itself, for a recorder installed since.
    Show,
    /// Fails the supervisor on purpose.
    InjectFault(FaultInjection),
}
