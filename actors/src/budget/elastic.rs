//! Leases that become smaller and larger after READY: what their owners say of them, and what they are told.

use std::{sync::Arc, time::Duration};

use bursar_budgets::Bytes;

/// How a budget watches its device after READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchOptions {
    /// How often the driver's free bytes are compared with the ledger; one second by default. While a neighbour takes
    /// memory, and for so long afterwards, it is sixteen times as often.
    pub every: Duration,
    /// How long memory has to stay free before it goes back to keys and values; ten seconds by default. A neighbour that
    /// takes and gives more often than that is left what it takes.
    pub patience: Duration,
}

impl Default for WatchOptions {
    fn default() -> Self {
        WatchOptions { every: Duration::from_secs(1), patience: Duration::from_secs(10) }
    }
}

/// How many times as often the device is looked at while a neighbour takes memory: it gets the canary's size a look, and
/// 256 MiB a second would be slow.
const HURRY: u32 = 16;

impl WatchOptions {
    /// Until the next look, so long after the canary was owed; none if it never was. However often somebody wants to look,
    /// others have to be answered too.
    pub(super) fn pause(&self, since_pressed: Option<Duration>) -> Duration {
        let is_hurried = since_pressed.is_some_and(|since| since < self.every);
        let pause = if is_hurried { self.every / HURRY } else { self.every };
        pause.max(Duration::from_millis(1))
    }
}

/// What the owner of an elastic lease says of it. Until then nothing is expected of the lease.
#[derive(Clone)]
pub struct Elastic {
    /// It keeps this much, whatever is ordered.
    pub floor: Bytes,
    /// It wants no more than this: what was stressed.
    pub most: Bytes,
    /// It grows by whole ones of these: a page a layer.
    pub step: Bytes,
    /// Hears orders. It must not block, and posts a message: the budget waits for nobody.
    pub orders: Arc<dyn Fn(Order) + Send + Sync>,
}

/// What the owner of an elastic lease is told. It answers by resizing the lease, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Another process has taken the canary's memory, or more: keep at most this, so that there is as much again for it
    /// to take. It is said at each look for as long as it is not done.
    GiveUp {
        /// The lease's size to come.
        to: Bytes,
    },
    /// So much has stayed free that the lease may grow to this. Somebody may be faster.
    MayGrow {
        /// The lease's size to come.
        to: Bytes,
    },
}
