//! Pure: the amount of memory to free in advance while another process keeps taking memory.
//!
//! A process can take only free memory, so leases first free as many bytes as the process has
//! taken. If the process keeps taking memory, leases also free memory in advance. Each time the
//! process takes at least half of that amount, the amount doubles, as in TCP slow start (Jacobson
//! 1988). A process that wants tens of GiB therefore waits for a few resizes of the KV cache
//! instead of hundreds. Each resize delays running steps. Memory that the process leaves unused
//! returns to the KV cache after it has stayed free for a while.

use std::time::Duration;

use bursar_budgets::Bytes;

/// Divisor of a device's memory: at most one 32nd of that memory is freed in advance.
const AHEAD_PARTS: u64 = 32;

/// History of another process that takes memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct PressureBackoff {
    /// Time at which leases last had to shrink to restore the canary.
    pressed: Option<Duration>,
    /// Foreign bytes when the amount freed in advance last changed.
    foreign: Bytes,
    ahead: Bytes,
}

/// Observations of a probe while leases must still shrink to restore the canary.
#[derive(Clone, Copy, Debug)]
pub struct Pressure {
    /// Time since the budget actor started.
    pub at: Duration,
    pub foreign: Bytes,
    /// The full size of the canary. It is also the first amount freed in advance, up to the limit
    /// of `AHEAD_PARTS`.
    pub canary: Bytes,
    /// Total bytes of the device.
    pub total: Bytes,
}

impl PressureBackoff {
    /// Time since leases last had to shrink to restore the canary. `None` if they never had to.
    pub fn since(&self, at: Duration) -> Option<Duration> {
        self.pressed.map(|pressed| at.saturating_sub(pressed))
    }

    /// Bytes to free in addition to the bytes owed. The amount is 0 at the first call, and at each
    /// call that comes at least `soon` after the previous call. Once the other process has taken
    /// half of the canary's size, the amount is that size. Each time that the process has then
    /// taken half of the amount, the amount doubles, up to the limit of `AHEAD_PARTS`.
    pub fn ahead(&mut self, seen: Pressure, soon: Duration) -> Bytes {
        let Pressure { at, foreign, canary, total } = seen;
        let goes_on = self.since(at).is_some_and(|since| since < soon);
        self.pressed = Some(at);
        if !goes_on {
            (self.ahead, self.foreign) = (Bytes::ZERO, foreign);
        // A process that needs one large allocation may leave some of the freed memory unused, so
        // the amount already doubles when the process has taken half of the freed memory.
        } else if foreign >= self.foreign + self.ahead.max(canary) / 2 {
            self.ahead = (self.ahead * 2).max(canary).min(total / AHEAD_PARTS);
            self.foreign = foreign;
        }
        self.ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(1);

    fn seen(milliseconds: u64, foreign: u64) -> Pressure {
        let (canary, total) = (Bytes::mib(256), Bytes::gib(64));
        Pressure { at: Duration::from_millis(milliseconds), foreign: Bytes::mib(foreign), canary, total }
    }

    #[test]
    fn the_backoff_doubles_up_to_a_share_of_the_device() {
        let mut backoff = PressureBackoff::default();
        assert_eq!(backoff.since(Duration::ZERO), None);
        let given = [(0, 300), (60, 600), (120, 1200), (180, 2400), (240, 4800), (300, 9000)]
            .map(|(at, foreign)| backoff.ahead(seen(at, foreign), SOON));
        assert_eq!(given, [0, 256, 512, 1024, 2048, 2048].map(Bytes::mib));
        assert_eq!(backoff.since(Duration::from_millis(400)), Some(Duration::from_millis(100)));
    }

    #[test]
    fn the_backoff_stays_constant_when_foreign_memory_stops_growing() {
        let mut backoff = PressureBackoff::default();
        backoff.ahead(seen(0, 300), SOON);
        let first = backoff.ahead(seen(60, 600), SOON);
        assert_eq!([120, 180, 240].map(|at| backoff.ahead(seen(at, 600), SOON)), [first; 3]);
    }

    #[test]
    fn the_backoff_grows_with_bytes_taken_not_with_probes() {
        let mut backoff = PressureBackoff::default();
        let given: Vec<Bytes> = (0..20).map(|look| backoff.ahead(seen(60 * look, 300 + 16 * look), SOON)).collect();
        assert_eq!(given[7], Bytes::ZERO, "112 MiB taken are below the threshold");
        assert_eq!(given[8..16], [Bytes::mib(256); 8], "half of the canary's 256 MiB were taken");
        assert_eq!(given[16..], [Bytes::mib(512); 4]);
    }

    #[test]
    fn the_backoff_restarts_when_foreign_growth_resumes_after_a_pause() {
        let mut backoff = PressureBackoff::default();
        backoff.ahead(seen(0, 300), SOON);
        assert!(!backoff.ahead(seen(900, 600), SOON).is_zero());
        assert_eq!(backoff.ahead(seen(1900, 900), SOON), Bytes::ZERO);
        assert_eq!(backoff.ahead(seen(2000, 1200), SOON), Bytes::mib(256));
    }
}
