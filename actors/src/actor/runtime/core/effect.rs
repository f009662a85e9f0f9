//! Effects that the runtime's core requests.

use std::time::Duration;

use bursar_budgets::DeviceError;

use super::input::Parts;
use crate::{
    metric::{SleepReason, WakeReason},
    sleep::{SleepError, SleepLevel},
};

/// An action to execute. The actions of one step are executed in order.
pub enum Effect<P: Parts> {
    /// Answer a load request with an error, because the runtime is shutting down.
    Refuse(P::LoadRequest),
    /// If a model of this name ended by itself, remove it from gauges and health.
    ForgetDead { name: String },
    /// Start the first engine of a model, and answer its loader when the model is READY.
    Begin {
        name: String,
        /// Number of the engine and of the load.
        generation: u64,
        request: P::LoadRequest,
    },
    /// Report that a dead engine restarts, and release its memory. Then, after the wait, send
    /// [`Respawn`](super::Input::Respawn).
    RespawnAfter { name: String, load: u64, death: u64, wait: Duration, reason: String },
    /// Start another engine of a model.
    Respawn { name: String, generation: u64 },
    /// Stop a model from taking requests. Send [`Due`](super::Input::Due) when the running requests
    /// have ended or their deadline has passed.
    Close {
        name: String,
        load: u64,
        /// How long running requests may still take.
        within: Duration,
    },
    /// Stop a model's engine and release all its memory, including the weights.
    /// [`Ended`](super::Input::Ended) follows. No other model can have the name until then.
    End {
        name: String,
        load: u64,
        /// The reason that late requests get, unless the engine has published another reason.
        reason: String,
    },
    Gone {
        name: String,
        /// If `false`, gauges still show the model, as a model that ended by itself.
        is_forgotten: bool,
    },
    /// Answer a caller that waited for the end of a model or of the runtime.
    Answer { waiter: P::Waiter, cut_off: usize },
    /// Report that the budget restarts. Then, after the wait, send
    /// [`RespawnBudget`](super::Input::RespawnBudget).
    RespawnBudgetAfter { death: u64, wait: Duration, reason: String },
    /// Start another budget. If it dies during its start, [`BudgetDied`](super::Input::BudgetDied)
    /// follows before any other input.
    SpawnBudget,
    /// Report the loss of the device to every request, end everything on the device, and create
    /// a successor. [`DeviceMade`](super::Input::DeviceMade) follows.
    LoseDevice {
        error: DeviceError,
        /// The models whose engines must be ended. All other models are already ending.
        models: Vec<String>,
        /// If `false`, no successor is created.
        replace: bool,
    },
    /// Publish a device and start a budget for it, in place of the lost device and its budget.
    /// Everything that models keep for their engines belongs to the lost device and is replaced.
    TakeDevice(P::Device),
    /// End the runtime and everything that it supervises with an error.
    Fail { reason: String },
    /// Stop admitting requests, and let running requests finish within the given time or, if none
    /// is given, within a time that suits the model. Unless the level is 2, lease host memory for
    /// the weights first. If no level is given, a failure of that lease is ignored.
    /// [`Drained`](super::Input::Drained) follows.
    BeginSleep {
        name: String,
        load: u64,
        /// The requested sleep level, if a caller gave one.
        level: Option<SleepLevel>,
        /// How long running requests may still take, if a caller gave a time.
        within: Option<Duration>,
        /// Number of times in a row that the requests did not end in time. If `within` is `None`,
        /// the allowed time doubles each time.
        stayed_busy: u32,
    },
    /// End a model's engine and release its device memory. The weights move to the host memory that
    /// was leased for them, unless `level` is level 2. [`FellAsleep`](super::Input::FellAsleep)
    /// follows.
    ReleaseEngine {
        name: String,
        load: u64,
        /// Level 2 if a model whose weights are in host memory must drop them, otherwise `None`.
        level: Option<SleepLevel>,
    },
    /// Admit requests again, because the model did not go to sleep.
    StayAwake { name: String },
    /// Publish that a model sleeps.
    ShowAsleep {
        name: String,
        level: SleepLevel,
        /// Why the model went to sleep. `None` if it slept before.
        reason: Option<SleepReason>,
    },
    /// Publish that a model will start as soon as it can.
    ShowWaking { name: String },
    /// Start an engine of a model that slept. [`Woken`](super::Input::Woken) or
    /// [`NotWoken`](super::Input::NotWoken) follows.
    Wake { name: String, load: u64, generation: u64 },
    /// Admit requests to a model that has become ready.
    ShowAwake {
        name: String,
        /// Why the model woke up. `None` if it was loaded.
        reason: Option<WakeReason>,
        /// Duration of the wake.
        took: Duration,
    },
    /// Report to callers that wait for a model why it did not wake up.
    ReportNotWoken { name: String },
    /// Report to the loader of a model why it did not start.
    FailStart { name: String },
    /// Collect idle reports of all models. [`IdleReports`](super::Input::IdleReports) follows,
    /// before any other input.
    ReportIdle,
    /// Collect idle reports again when one of the `busy` models has no more requests, or at the
    /// latest after `within`.
    ReportIdleLater { busy: Vec<String>, within: Duration },
    /// Answer a caller that waited for a model to sleep.
    AnswerSleeper {
        sleeper: P::Sleeper,
        /// `Ok` if the model sleeps.
        outcome: Result<(), SleepError>,
    },
    /// Stop the runtime, because its shutdown is complete.
    Stop,
}
