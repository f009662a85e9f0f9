//! How much more than it has taken a neighbour is given that goes on taking: pure.
//!
//! A neighbour can only take what is free. It is given as much again as it has taken, and each time that it takes that
//! too, soon after, twice as much ahead of it (as slow start finds a rate, Jacobson 1988): one that wants tens of
//! gibibytes waits for a few changes of keys and values and not for hundreds, each of which costs the steps under way.
//! What it leaves goes back to them when it has stayed free for a while.

use std::time::Duration;

use bursar_budgets::Bytes;

/// So many parts of a device are given ahead at most.
const AHEAD_PARTS: u64 = 32;

/// What was seen of a neighbour that takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct PressureBackoff {
    /// When the canary was last owed.
    pressed: Option<Duration>,
    /// What others held when it was last given more.
    foreign: Bytes,
    ahead: Bytes,
}

/// What a look sees that finds the canary owed.
#[derive(Clone, Copy, Debug)]
pub struct Pressure {
    /// Since the watcher was born.
    pub at: Duration,
    /// What others hold.
    pub foreign: Bytes,
    /// What should be kept free of use: the least that is given ahead.
    pub canary: Bytes,
    /// The device's memory.
    pub total: Bytes,
}

impl PressureBackoff {
    /// How long ago the canary was owed; none if it never was.
    pub fn since(&self, at: Duration) -> Option<Duration> {
        self.pressed.map(|pressed| at.saturating_sub(pressed))
    }

    /// What a neighbour is given beside what is owed; `soon` is how soon after the last look it has to have taken more.
    pub fn ahead(&mut self, seen: Pressure, soon: Duration) -> Bytes {
        let Pressure { at, foreign, canary, total } = seen;
        let goes_on = self.since(at).is_some_and(|since| since < soon);
        self.pressed = Some(at);
        if !goes_on {
            (self.ahead, self.foreign) = (Bytes::ZERO, foreign);
        // What it leaves of that may be too little for a piece of its own.
        } else if foreign >= self.foreign + Bytes(self.ahead.max(canary).0 / 2) {
            self.ahead = (self.ahead * 2).max(canary).min(Bytes(total.0 / AHEAD_PARTS));
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
