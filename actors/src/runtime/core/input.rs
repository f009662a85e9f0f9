//! What a runtime's decisions take in.

use std::time::Duration;

use bursar_budgets::DeviceError;

use super::{Parts, sleep_state::IdleReport};
use crate::{
    metric::WakeReason,
    sleep::{SleepError, SleepLevel},
    supervise::Intensity,
};

/// What happened, or is asked for.
pub enum Input<P: Parts> {
    /// A model is to be loaded.
    Load(Load<P>),
    /// A model is to end. An unknown name is answered at once.
    Unload {
        /// The model's name.
        name: String,
        /// How long running requests may still take.
        within: Duration,
        /// Who waits for its end.
        waiter: P::Waiter,
    },
    /// A model did not start, or its loader no longer waits for it.
    Forget {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// Who waits for its end.
        waiter: Option<P::Waiter>,
    },
    /// A model's running requests have ended, or their time is up.
    Due {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
    },
    /// All memory of a model is back.
    Ended {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// Requests that ran when it began to end.
        cut_off: usize,
    },
    /// An engine ended after it had given its reason.
    EngineGaveUp {
        /// The model's name.
        name: String,
        /// How it ended.
        reason: String,
    },
    /// An engine died, though its device is well.
    EngineDied {
        /// The model's name.
        name: String,
        /// How it died.
        reason: String,
    },
    /// A dead engine's memory is back and its wait is over.
    Respawn {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// The number of the death.
        death: u64,
    },
    /// The budget died.
    BudgetDied {
        /// How it died.
        reason: String,
    },
    /// The wait before the budget's restart is over.
    RespawnBudget {
        /// The number of the death.
        death: u64,
    },
    /// The current device is lost.
    DeviceLost(DeviceError),
    /// Everything on the lost device has ended. This is its successor, or why there is none.
    DeviceMade(Result<P::Device, DeviceError>),
    /// A model is to sleep.
    Sleep {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// How deeply.
        level: SleepLevel,
        /// How long running requests may still take.
        within: Duration,
        /// Who waits for it to sleep.
        sleeper: P::Sleeper,
    },
    /// A model is to be awake.
    Wake {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// Why.
        reason: WakeReason,
    },
    /// The requests of a model that falls asleep have ended, or why it stays awake.
    Drained {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// Whether they have ended.
        drained: Result<(), SleepError>,
    },
    /// All device memory of a model is back.
    FellAsleep {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// What became of its weights.
        level: SleepLevel,
    },
    /// An engine is READY for the first time.
    Woken {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
    },
    /// An engine ended before it was READY, and has given its reason.
    NotWoken {
        /// The model's name.
        name: String,
        /// It lacked memory that other models hold.
        may_fit: bool,
    },
    /// What a look saw, once a second and when it was asked for.
    IdleReports(Vec<IdleReport>),
    /// Every model is to end, and then the runtime.
    ShutDown {
        /// How long running requests may still take.
        within: Duration,
        /// Who waits for the end.
        waiter: P::Waiter,
    },
}

/// A model to load.
pub struct Load<P: Parts> {
    /// Its name. If that is taken, the next free one like it.
    pub name: String,
    /// How many restarts of its engine are tolerated, and within what time.
    pub intensity: Intensity,
    /// It is put to sleep when it has had no request for this long.
    pub sleep_after: Option<Duration>,
    /// What is loaded, and who is told of it.
    pub order: P::LoadRequest,
}
