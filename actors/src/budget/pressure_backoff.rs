//! How much memory is freed ahead of a neighbour that keeps taking: pure.
//!
//! A neighbour can only take what is free, so as much again is freed as it has taken. Each time it soon takes that too,
//! the amount ahead of it doubles, as slow start finds a rate (Jacobson 1988). So a neighbour that wants tens of GiB
//! waits for a few changes of keys and values, not for hundreds, each of which costs running steps. What it leaves goes
//! back to keys and values after it has stayed free for a while.

use std::time::Duration;

use bursar_budgets::Bytes;

/// At most this fraction of a device is freed ahead: one 32nd.
const AHEAD_PARTS: u64 = 32;

/// What is known of a neighbour that takes memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct PressureBackoff {
    /// When the canary was last owed.
    pressed: Option<Duration>,
    /// Foreign bytes when more was last freed.
    foreign: Bytes,
    ahead: Bytes,
}

/// What a look sees while the canary is owed.
#[derive(Clone, Copy, Debug)]
pub struct Pressure {
    /// Time since the watcher was created.
    pub at: Duration,
    /// Foreign bytes.
    pub foreign: Bytes,
    /// The canary's full size, and the least that is freed ahead.
    pub canary: Bytes,
    /// The device's memory.
    pub total: Bytes,
}

impl PressureBackoff {
    /// How long ago the canary was owed. None if it never was.
    pub fn since(&self, at: Duration) -> Option<Duration> {
        self.pressed.map(|pressed| at.saturating_sub(pressed))
    }

    /// Bytes to free ahead of a neighbour, beyond what is owed. The amount doubles if the neighbour has taken more
    /// within `soon` of the last look.
    pub fn ahead(&mut self, seen: Pressure, soon: Duration) -> Bytes {
        let Pressure { at, foreign, canary, total } = seen;
        let goes_on = self.since(at).is_some_and(|since| since < soon);
        self.pressed = Some(at);
        if !goes_on {
            (self.ahead, self.foreign) = (Bytes::ZERO, foreign);
        // A neighbour that needs one large piece may leave some of what was freed, so taking half of it counts.
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
    fn a_neighbour_that_stops_taking_is_given_no_more() {
        let mut backoff = PressureBackoff::default();
        backoff.ahead(seen(0, 300), SOON);
        let first = backoff.ahead(seen(60, 600), SOON);
        assert_eq!([120, 180, 240].map(|at| backoff.ahead(seen(at, 600), SOON)), [first; 3]);
    }

    #[test]
    fn the_backoff_grows_with_bytes_taken_not_with_looks() {
        let mut backoff = PressureBackoff::default();
        let given: Vec<Bytes> = (0..20).map(|look| backoff.ahead(seen(60 * look, 300 + 16 * look), SOON)).collect();
        assert_eq!(given[7], Bytes::ZERO, "112 MiB more");
        assert_eq!(given[8..16], [Bytes::mib(256); 8], "half of the canary's 256 more");
        assert_eq!(given[16..], [Bytes::mib(512); 4]);
    }

    #[test]
    fn a_neighbour_returning_later_starts_afresh() {
        let mut backoff = PressureBackoff::default();
        backoff.ahead(seen(0, 300), SOON);
        assert!(!backoff.ahead(seen(900, 600), SOON).is_zero());
        assert_eq!(backoff.ahead(seen(1900, 900), SOON), Bytes::ZERO);
        assert_eq!(backoff.ahead(seen(2000, 1200), SOON), Bytes::mib(256));
    }
}
