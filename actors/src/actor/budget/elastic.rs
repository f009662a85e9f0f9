//! Declarations and orders for leases that shrink and grow after READY.

use std::{sync::Arc, time::Duration};

use bursar_budgets::Bytes;

use super::SharedKvDemand;

/// How often a budget probes its device after READY, and how soon it returns free memory to KV
/// caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchOptions {
    /// Interval at which the driver's free bytes are compared with the ledger. Default: 1 s.
    ///
    /// While another process takes memory, and for one such interval afterward, probes are 16
    /// times as frequent. A cheaper check for memory taken by another process runs 20 times per
    /// interval, but at most 100 times a second.
    pub every: Duration,
    /// How long memory must stay free before it is returned to the KV cache. Default: 10 s. If
    /// another process takes and frees memory in a shorter cycle, the KV cache stays small enough
    /// for the peak of that process.
    pub patience: Duration,
}

impl Default for WatchOptions {
    fn default() -> Self {
        WatchOptions { every: Duration::from_secs(1), patience: Duration::from_secs(10) }
    }
}

/// Factor by which the probe rate rises while another process takes memory. When only the canary is
/// still free, that process can take at most the canary between two probes. At the normal interval
/// of 1 s, a canary of 256 MiB would limit the process to 256 MiB per second.
const HURRY: u32 = 16;

impl WatchOptions {
    /// The wait until the next probe. `since_pressed` is the time since part of the canary was last
    /// missing; `None` if part of it was never missing. The wait has a lower bound, so that the
    /// budget can answer other messages between probes.
    pub(super) fn pause(&self, since_pressed: Option<Duration>) -> Duration {
        let is_hurried = since_pressed.is_some_and(|since| since < self.every);
        let pause = if is_hurried { self.every / HURRY } else { self.every };
        pause.max(Duration::from_millis(1))
    }

    /// The wait until the next quick check for memory taken by another process.
    pub(super) fn quick_check_pause(&self) -> Duration {
        (self.every / QUICK_CHECKS).max(QUICK_CHECK_PAUSE_MIN)
    }
}

/// Number of quick checks per [`WatchOptions::every`]. At the default interval, a process that
/// waits for a GiB gets its first bytes within 50 ms. Each check costs about 30 µs for the driver's
/// answer.
const QUICK_CHECKS: u32 = 20;
const QUICK_CHECK_PAUSE_MIN: Duration = Duration::from_millis(10);

/// Declaration of an elastic lease by its owner. The budget sends no orders for a lease before its
/// owner has made this declaration.
#[derive(Clone)]
pub struct Elastic {
    /// The smallest size that an order may ask for.
    pub floor: Bytes,
    /// The largest size, which is the size that was stress-tested before READY.
    pub most: Bytes,
    /// Unit of growth: one page per layer.
    pub step: Bytes,
    /// How the lease lends and borrows. `None` if it does neither.
    pub lends: Option<Lends>,
    /// Callback that receives orders. The callback must post a message and return without blocking,
    /// because the budget never waits.
    pub orders: Arc<dyn Fn(ResizeOrder) + Send + Sync>,
}

/// How an elastic lease lends and borrows.
#[derive(Clone)]
pub struct Lends {
    pub demand: Arc<SharedKvDemand>,
    /// The largest size that the lease can use, including borrowed memory.
    pub limit: Bytes,
}

/// An order to the owner of an elastic lease. The owner answers by resizing the lease, or not at
/// all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeOrder {
    /// Shrink the lease to at most `to`. The budget sends this order when another process has taken
    /// at least a part of the canary. It also sends the order when another model or a waiting lease
    /// needs the memory, if this lease's model has no requests or has borrowed the memory. Each
    /// probe repeats the order until the lease has shrunk.
    GiveUp { to: Bytes },
    /// The lease may grow, because memory has stayed free or another lease has given it up. Another
    /// request may get the memory first.
    MayGrow { to: Bytes },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_run_sixteen_times_as_often_shortly_after_pressure() {
        let watch = WatchOptions::default();
        let pauses = [None, Some(0), Some(999), Some(1000)].map(|since| watch.pause(since.map(Duration::from_millis)));
        let hurried = Duration::from_micros(62_500);
        assert_eq!(pauses, [watch.every, hurried, hurried, watch.every]);
        let often = WatchOptions { every: Duration::from_millis(1), ..watch };
        assert_eq!(often.pause(Some(Duration::ZERO)), often.every, "other messages are handled between the probes");
    }
}
