//! What a runtime's decisions have done.

use std::time::Duration;

use bursar_budgets::DeviceError;

use super::Parts;

/// What must be done, in order.
pub enum Effect<P: Parts> {
    /// Answer that nothing is loaded while the runtime is shut down.
    Refuse(P::Order),
    /// Stop showing a model of this name that has ended by itself.
    ForgetFallen {
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
        order: P::Order,
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
    /// Stop: the runtime is shut down.
    Stop,
}
