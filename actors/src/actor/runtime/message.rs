//! Messages of the runtime supervisor.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bursar_budgets::Device;
use bursar_model::checkpoint::CheckpointOrigin;
use ractor::ActorCell;

use super::{
    Health,
    core::{Input, Parts},
};
use crate::{
    chat::ModelHandle,
    engine::{LoadOptions, ProgressSink, StartError},
    responder::Responder,
    sleep::{SleepError, SleepOrder},
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

/// The types that the core of this runtime passes on without inspecting them.
pub struct ActorParts;

impl Parts for ActorParts {
    type LoadRequest = Box<LoadRequest>;
    type Waiter = OnReleased;
    type Sleeper = Responder<Result<(), SleepError>>;
    type Device = Arc<dyn Device>;
}

/// Messages of the runtime supervisor. Users send few of them, and the supervisor and its tasks
/// send the rest.
pub enum RuntimeMessage {
    /// An input of the core. The supervisor and its tasks send these messages.
    Input(Input<ActorParts>),
    /// Loads a model. Answered when the model is READY or has failed.
    Load {
        name: String,
        /// The model to load, and the callbacks for its start.
        request: Box<LoadRequest>,
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
    /// The budget found the device lost.
    DeviceLost,
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
        /// The load number, because another model may have this name by now.
        load: u64,
        order: SleepOrder,
    },
    /// Checks for models that should be put to sleep.
    CheckIdle,
    /// Sets the gauges again and checks for idle models. The supervisor sends this message to
    /// itself regularly, so that a recorder that was installed later has all gauges.
    Show,
    /// Fails the supervisor on purpose.
    InjectFault(FaultInjection),
}
