//! What a runtime's decisions have done.

use std::time::Duration;

use bursar_budgets::DeviceError;

use super::Parts;
use crate::{
    metric::{SleepReason, WakeReason},
    sleep::{SleepError, SleepLevel},
};

/// What must be done, in order.
pub enum Effect<P: Parts> {
    /// Answer that nothing is loaded while the runtime is shut down.
    Refuse(P::LoadRequest),
    /// Stop showing a model of this name that has ended by itself.
    ForgetDead {
        /// The model's name.
        name: String,
    },
    /// Start the first engine of a model, and answer its loader when it is READY.
    Begin {
        /// The model's name.
        name: String,
        /// The engine's number, and the load's.
        generation: u64,
        /// What is loaded.
        order: P::LoadRequest,
    },
    /// Say that a dead engine restarts, and take back what it held. Then, after the wait, send
    /// [`Respawn`](super::Input::Respawn).
    RespawnAfter {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// The number of the death.
        death: u64,
        /// The wait.
        wait: Duration,
        /// How the engine died.
        reason: String,
    },
    /// Start another engine of a model.
    Respawn {
        /// The model's name.
        name: String,
        /// The engine's number.
        generation: u64,
    },
    /// Let a model take no more requests. Send [`Due`](super::Input::Due) when the running ones have ended, or their time
    /// is up.
    Close {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// How long running requests may still take.
        within: Duration,
    },
    /// Stop a model's engine and take back all its memory, weights too. [`Ended`](super::Input::Ended) follows. Its name
    /// stays taken until then.
    End {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// The reason for requests that come too late, unless the engine has given one.
        reason: String,
    },
    /// Forget a model that has ended.
    Gone {
        /// The model's name.
        name: String,
        /// If not, it is still shown, as one that has ended by itself.
        is_let_go: bool,
    },
    /// Answer one who waited for an end.
    Answer {
        /// Who waited.
        waiter: P::Waiter,
        /// Requests that were cut off.
        cut_off: usize,
    },
    /// Say that the budget restarts. Then, after the wait, send [`RespawnBudget`](super::Input::RespawnBudget).
    RespawnBudgetAfter {
        /// The number of the death.
        death: u64,
        /// The wait.
        wait: Duration,
        /// How the budget died.
        reason: String,
    },
    /// Start another budget. If it dies meanwhile, [`BudgetDied`](super::Input::BudgetDied) follows before any other
    /// input.
    SpawnBudget,
    /// Tell every request that the device is lost, end what is on it, and have a successor made.
    /// [`DeviceMade`](super::Input::DeviceMade) follows.
    LoseDevice {
        /// Why it is lost.
        error: DeviceError,
        /// The models whose engines end. Others are ending already.
        models: Vec<String>,
        /// If not, there is no successor.
        replace: bool,
    },
    /// Publish a device and start a budget for it, in place of the lost one's. What models keep for their engines belongs
    /// to the lost one.
    TakeDevice(P::Device),
    /// Die, and with the runtime everything under it.
    Fail {
        /// The reason, in words.
        reason: String,
    },
    /// Let no more requests in, and have those that are in end within the time, or one that suits the model. At level 1 lease host
    /// memory for the weights first; without a level, only if there is some. [`Drained`](super::Input::Drained) follows.
    BeginSleep {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// How deeply, if that was said.
        level: Option<SleepLevel>,
        /// How long running requests may still take.
        within: Option<Duration>,
        /// How often in a row they did not end in time. Without a time they have twice as long after each.
        stayed_busy: u32,
    },
    /// End a model's engine and take back its device memory. Its weights go to the host memory that was leased for them,
    /// unless this is level 2. [`FellAsleep`](super::Input::FellAsleep) follows.
    ReleaseEngine {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// How deeply, if it slept before.
        level: Option<SleepLevel>,
    },
    /// Let requests in again: the model did not fall asleep.
    StayAwake {
        /// The model's name.
        name: String,
    },
    /// Publish that a model sleeps.
    ShowAsleep {
        /// The model's name.
        name: String,
        /// How deeply.
        level: SleepLevel,
        /// Why it fell asleep. None if it slept before.
        reason: Option<SleepReason>,
    },
    /// Publish that a model will start as soon as it can.
    ShowWaking {
        /// The model's name.
        name: String,
    },
    /// Start an engine of a model that slept. [`Woken`](super::Input::Woken) or [`NotWoken`](super::Input::NotWoken)
    /// follows.
    Wake {
        /// The model's name.
        name: String,
        /// The load.
        load: u64,
        /// The engine's number.
        generation: u64,
    },
    /// Let requests in.
    ShowAwake {
        /// The model's name.
        name: String,
        /// Why it woke up. None if it was loaded.
        reason: Option<WakeReason>,
        /// How long that took.
        took: Duration,
    },
    /// Tell those who wait for a model why it did not wake up.
    TellNotWoken {
        /// The model's name.
        name: String,
    },
    /// Tell the loader of a model why it did not start.
    FailStart {
        /// The model's name.
        name: String,
    },
    /// Look at all models. [`IdleReports`](super::Input::IdleReports) follows, before any other input.
    ReportIdle,
    /// Look again when one of these has no more requests, or after this time.
    ReportIdleLater {
        /// Models with requests.
        busy: Vec<String>,
        /// How long to wait at most.
        within: Duration,
    },
    /// Answer one who waited for a model to sleep.
    AnswerSleeper {
        /// Who waited.
        sleeper: P::Sleeper,
        /// Whether it sleeps.
        outcome: Result<(), SleepError>,
    },
    /// Stop: the runtime is shut down.
    Stop,
}
