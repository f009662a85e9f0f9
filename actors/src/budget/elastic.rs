//! Leases that shrink and grow after READY: what owners declare, and what orders they get.

use std::{sync::Arc, time::Duration};

use bursar_budgets::Bytes;

use super::SharedKvDemand;

/// How a budget watches its device after READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchOptions {
    /// How often the driver's free bytes are compared with the ledger. Default: 1 s. While a neighbour takes memory,
    /// and for one such interval afterwards, it is sixteen times as often. Whether one has begun to is asked twenty times as
    /// often, but not more than a hundred times a second.
    pub every: Duration,
    /// How long memory must stay free before it goes back to keys and values. Default: 10 s. A neighbour that takes and
    /// gives more often than that keeps what it takes.
    pub patience: Duration,
}

impl Default for WatchOptions {
    fn default() -> Self {
        WatchOptions { every: Duration::from_secs(1), patience: Duration::from_secs(10) }
    }
}

/// How many times as often the device is looked at while a neighbour takes memory. A neighbour gets the canary's size
/// per look, and 256 MiB a second would be slow.
const HURRY: u32 = 16;

impl WatchOptions {
    /// The wait until the next look, given how long ago the canary was owed (none: never). It has a lower bound, so
    /// that the budget can answer others too.
    pub(super) fn pause(&self, since_pressed: Option<Duration>) -> Duration {
        let is_hurried = since_pressed.is_some_and(|since| since < self.every);
        let pause = if is_hurried { self.every / HURRY } else { self.every };
        pause.max(Duration::from_millis(1))
    }

    /// The wait until it is asked again whether a neighbour takes memory.
    pub(super) fn glance(&self) -> Duration {
        (self.every / GLANCES).max(GLANCE_LEAST)
    }
}

/// How many times as often it is asked whether a neighbour takes memory: one that waits for a GiB has some of it within 50 ms.
/// An answer of the driver costs some 30 µs.
const GLANCES: u32 = 20;
const GLANCE_LEAST: Duration = Duration::from_millis(10);

/// What the owner of an elastic lease declares. Until then nothing is expected of the lease.
#[derive(Clone)]
pub struct Elastic {
    /// The size that it keeps, whatever is ordered.
    pub floor: Bytes,
    /// Its largest size: what was stressed.
    pub most: Bytes,
    /// It grows in multiples of this: one page per layer.
    pub step: Bytes,
    /// How it lends and borrows. None if it does neither.
    pub lends: Option<Lends>,
    /// Receives orders. It must post a message and not block, because the budget never waits.
    pub orders: Arc<dyn Fn(ResizeOrder) + Send + Sync>,
}

/// What lending goes by.
#[derive(Clone)]
pub struct Lends {
    /// How much its model needs it.
    pub demand: Arc<SharedKvDemand>,
    /// The most that it can use of its own and of what others lend.
    pub limit: Bytes,
}

/// An order to the owner of an elastic lease. The owner answers by resizing the lease, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeOrder {
    /// Another process has taken memory of the canary, or more; or other models need it, or a tenant does, while this
    /// lease's model has no requests. Keep at most this. Repeated at each look until it is done.
    GiveUp {
        /// The largest size allowed now.
        to: Bytes,
    },
    /// Enough has stayed free for the lease to grow, or another has given it up. Another request may get it first.
    MayGrow {
        /// The size that it may grow to.
        to: Bytes,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_sixteen_times_as_often_until_an_interval_after_pressure() {
        let watch = WatchOptions::default();
        let pauses = [None, Some(0), Some(999), Some(1000)].map(|since| watch.pause(since.map(Duration::from_millis)));
        let hurried = Duration::from_micros(62_500);
        assert_eq!(pauses, [watch.every, hurried, hurried, watch.every]);
        let often = WatchOptions { every: Duration::from_millis(1), ..watch };
        assert_eq!(often.pause(Some(Duration::ZERO)), often.every, "others are answered in between");
    }
}
