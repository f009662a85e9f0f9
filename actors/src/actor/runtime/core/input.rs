//! Inputs of the runtime's core, and the types that it passes on.

use std::time::Duration;

use bursar_budgets::DeviceError;

use super::sleep_state::IdleReport;
use crate::{
    metric::WakeReason,
    sleep::{SleepError, SleepLevel},
    supervise::Intensity,
};

/// Types that the core passes on without inspecting them.
pub trait Parts {
    /// The model to load, and the callbacks for its start.
    type LoadRequest;
    /// A caller that waits for the end of a model or of the runtime. The answer is the number of
    /// requests that were cut off.
    type Waiter;
    /// A caller that waits until a model sleeps.
    type Sleeper;
    type Device;
}

/// An event or a request. `load` identifies a load of a model, because another model may have the
/// same name by now.
pub enum Input<P: Parts> {
    Load(Load<P>),
    /// Requests the end of a model. If the name is unknown, the waiter is answered at once.
    Unload {
        name: String,
        /// How long running requests may still take.
        within: Duration,
        waiter: P::Waiter,
    },
    /// A model did not start, or its loader no longer waits for it.
    Forget {
        name: String,
        load: u64,
        waiter: Option<P::Waiter>,
    },
    /// The running requests of a model have ended, or their deadline has passed.
    Due {
        name: String,
        load: u64,
    },
    /// All memory of a model is returned.
    Ended {
        name: String,
        load: u64,
        /// Number of requests that were running when the model began to end.
        cut_off: usize,
    },
    /// An engine ended after it had published the reason.
    EngineGaveUp {
        name: String,
        reason: String,
    },
    /// An engine died although its device is not lost.
    EngineDied {
        name: String,
        reason: String,
    },
    /// The memory of a dead engine is returned, and the wait before its restart is over.
    Respawn {
        name: String,
        load: u64,
        /// The number of the death, because the engine may have been replaced since.
        death: u64,
    },
    BudgetDied {
        reason: String,
    },
    /// The wait before the budget's restart is over.
    RespawnBudget {
        /// The number of the death, because the budget may have been replaced since.
        death: u64,
    },
    /// The current device is lost.
    DeviceLost(DeviceError),
    /// Everything on the lost device has ended. Contains the successor of the device, or the reason
    /// why there is no successor.
    DeviceMade(Result<P::Device, DeviceError>),
    /// Requests that a model be put to sleep.
    Sleep {
        name: String,
        load: u64,
        level: SleepLevel,
        /// How long running requests may still take.
        within: Duration,
        sleeper: P::Sleeper,
    },
    /// Requests that a model be woken, unless it is awake.
    Wake {
        name: String,
        load: u64,
        reason: WakeReason,
    },
    /// The requests of a model that is going to sleep have ended, or the model stays awake.
    Drained {
        name: String,
        load: u64,
        /// `Ok` if the requests have ended, otherwise the reason why the model stays awake.
        drained: Result<(), SleepError>,
    },
    /// All device memory of a model is returned.
    FellAsleep {
        name: String,
        load: u64,
        /// The sleep level that was reached: level 1 if host memory has a copy of the weights,
        /// otherwise level 2.
        level: SleepLevel,
    },
    /// A model's engine is READY after a load or a wake.
    Woken {
        name: String,
        load: u64,
    },
    /// An engine ended before it was READY, and has published its reason.
    NotWoken {
        name: String,
        /// Whether the engine failed for lack of memory, and other models hold that much memory.
        may_fit: bool,
    },
    /// Idle reports of all models, once a second and after
    /// [`Effect::ReportIdle`](super::Effect::ReportIdle).
    IdleReports(Vec<IdleReport>),
    /// Requests the end of every model and then of the runtime.
    ShutDown {
        /// How long running requests may still take.
        within: Duration,
        waiter: P::Waiter,
    },
}

pub struct Load<P: Parts> {
    /// The model's name. If another model has this name, a number is appended.
    pub name: String,
    /// How many restarts of the engine are tolerated, and within what time.
    pub intensity: Intensity,
    /// The model is put to sleep when it has had no request for this long.
    pub sleep_after: Option<Duration>,
    /// The model to load, and the callbacks for its start.
    pub request: P::LoadRequest,
}
