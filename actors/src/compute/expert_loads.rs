//! Balance of the tokens of a mixture-of-experts model across its experts.

use std::time::{Duration, Instant};

use bursar_kernels::ops::transfer::Later;

/// Interval between two reads of the counters. Each read downloads a few KiB.
const EVERY: Duration = Duration::from_secs(1);

/// The expert counters of a lane at the last read, and the time of that read.
pub(super) struct ExpertLoads {
    experts: usize,
    looked: Instant,
    before: Vec<u32>,
}

/// A download of the counters that is still running.
pub(super) type PendingLoads = Later<u32>;

impl ExpertLoads {
    /// Creates the state for layers of `experts` experts each. The first read is due at once and
    /// only sets the baseline.
    pub(super) fn new(experts: usize, now: Instant) -> Self {
        ExpertLoads { experts, looked: now.checked_sub(EVERY).unwrap_or(now), before: Vec::new() }
    }

    /// Whether a read is due. If it is, the next interval starts at `now`.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.looked) >= EVERY;
        if is_due {
            self.looked = now;
        }
        is_due
    }

    /// Ratio of the tokens of the busiest expert to the average per expert since the last read, in
    /// the layer where the ratio is largest. `counts` contains the counters of all layers, one
    /// layer after the other. `None` if no expert was chosen, or at the first read.
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
        assert_eq!(loads.imbalance(vec![9, 9, 9, 9, u32::MAX, 0, 0, 0]), None, "the first loads are the baseline");
        // The first layer is balanced. In the second layer one counter overflows and gets
        // 8 of 10 tokens.
        assert_eq!(loads.imbalance(vec![10, 10, 10, 10, 7, 1, 1, 0]), Some(3.2));
        assert_eq!(loads.imbalance(vec![10, 10, 10, 10, 7, 1, 1, 0]), None, "no expert was chosen since the last read");
        assert_eq!(
            loads.imbalance(vec![11, 11, 11, 11, 7, 1, 1, 0]),
            Some(1.0),
            "a layer without new choices is ignored"
        );
    }

    #[test]
    fn a_look_is_due_at_once_and_then_every_second() {
        let now = Instant::now();
        let mut loads = ExpertLoads::new(4, now);
        let due = [0, 10, 999, 1000, 1999, 2000].map(|millis| loads.is_due(now + Duration::from_millis(millis)));
        assert_eq!(due, [true, false, false, true, false, true]);
    }
}
