//! How evenly a mixture's tokens are shared out among its experts.

use std::time::{Duration, Instant};

use bursar_kernels::ops::transfer::Later;

/// How often a lane looks: the counters take some KiB to read.
const EVERY: Duration = Duration::from_secs(1);

/// What a lane saw when it looked last.
pub(super) struct ExpertLoads {
    experts: usize,
    looked: Instant,
    before: Vec<u32>,
}

/// The counters on their way to the host.
pub(super) type PendingLoads = Later<u32>;

impl ExpertLoads {
    /// For layers of `experts` experts. The first look is due at once, and only says where to count from.
    pub(super) fn new(experts: usize, now: Instant) -> Self {
        ExpertLoads { experts, looked: now.checked_sub(EVERY).unwrap_or(now), before: Vec::new() }
    }

    /// Whether it is time to look. If so, the next time is counted from `now`.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.looked) >= EVERY;
        if is_due {
            self.looked = now;
        }
        is_due
    }

    /// How many times as often the busiest expert was chosen as the average one since the look before, in the layer where
    /// that is most. `counts` are those of all layers, one after the other. None if nothing was chosen, or at the first
    /// look.
    pub(super) fn imbalance(&mut self, counts: Vec<u32>) -> Option<f64> {
        let before = std::mem::replace(&mut self.before, counts);
        let since = self.before.iter().zip(&before).map(|(now, before)| now.wrapping_sub(*before)).collect::<Vec<_>>();
        let of_layer = |chosen: &[u32]| {
            let (most, sum) =
                (chosen.iter().max().copied()?, chosen.iter().map(|chosen| u64::from(*chosen)).sum::<u64>());
            (sum > 0).then(|| f64::from(most) * self.experts as f64 / sum as f64)
        };
        since.chunks(self.experts).filter_map(of_layer).max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layer_that_is_shared_out_worst_counts_from_the_second_look_on() {
        let mut loads = ExpertLoads::new(4, Instant::now());
        assert_eq!(loads.imbalance(vec![9, 9, 9, 9, u32::MAX, 0, 0, 0]), None, "where to count from");
        // The first layer evenly, the second one over the end of its counter: 8 of 10.
        assert_eq!(loads.imbalance(vec![10, 10, 10, 10, 7, 1, 1, 0]), Some(3.2));
        assert_eq!(loads.imbalance(vec![10, 10, 10, 10, 7, 1, 1, 0]), None, "nothing was chosen");
        assert_eq!(loads.imbalance(vec![11, 11, 11, 11, 7, 1, 1, 0]), Some(1.0), "one layer stood still");
    }

    #[test]
    fn a_look_is_due_at_once_and_then_every_second() {
        let now = Instant::now();
        let mut loads = ExpertLoads::new(4, now);
        let due = [0, 10, 999, 1000, 1999, 2000].map(|millis| loads.is_due(now + Duration::from_millis(millis)));
        assert_eq!(due, [true, false, false, true, false, true]);
    }
}
