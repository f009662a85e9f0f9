//! Pure: a supervisor's decision after a death, with the time as an argument.

use std::{collections::VecDeque, ops::Range, time::Duration};

/// Which children in an ordered list restart when a child dies. The names are those of Erlang's
/// OTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    OneForOne,
    /// The dead child and all children started after it.
    RestForOne,
}

/// The restarts that are tolerated within a time window. More restarts are a crash loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intensity {
    /// Restarts allowed within the window.
    pub restarts_max: usize,
    pub within: Duration,
    /// The wait before the first restart of a window. Each further wait is twice as long,
    /// up to 5 s.
    pub back_off: Duration,
}

impl Intensity {
    /// The limit for a model's vision and scheduler actors together. A restart costs each running
    /// request a prefill.
    pub const SERVING: Intensity =
        Intensity { restarts_max: 5, within: Duration::from_secs(60), back_off: Duration::from_millis(10) };

    /// The limit for a model's engine. A restart repeats the stress runs, so fewer restarts are
    /// tolerated, over a longer time.
    pub const ENGINE: Intensity =
        Intensity { restarts_max: 3, within: Duration::from_secs(300), back_off: Duration::from_millis(50) };

    /// The limit for losses of the device. A device that is lost twice within an hour will probably
    /// be lost again.
    pub const DEVICE: Intensity =
        Intensity { restarts_max: 1, within: Duration::from_secs(3600), back_off: Duration::ZERO };

    /// The limit for the budget actor. A restart only rebuilds the ledger, which takes almost no
    /// time, and every other actor waits for the restart.
    pub const BUDGET: Intensity =
        Intensity { restarts_max: 5, within: Duration::from_secs(60), back_off: Duration::from_millis(1) };
}

impl Default for Intensity {
    fn default() -> Self {
        Intensity::SERVING
    }
}

/// The longest wait, unless `back_off` itself is longer. This limit is short because requests wait
/// for the restart too.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// A supervisor's decision after a death.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Stop the children in this range that are still alive, the last one first. After the wait,
    /// start all children in the range, the first one first.
    Restart {
        /// Indices in the list of children.
        children: Range<usize>,
        after: Duration,
    },
    /// The restarts are a crash loop. Stop everything and report the reason.
    GiveUp {
        /// Restarts within the window.
        restarts: usize,
        within: Duration,
    },
}

/// The restarts of one supervisor's children.
#[derive(Clone, Debug)]
pub struct RestartLog {
    policy: Policy,
    intensity: Intensity,
    children: usize,
    restarts: VecDeque<Duration>,
}

impl RestartLog {
    /// A log for a supervisor of `children` children.
    pub fn new(policy: Policy, intensity: Intensity, children: usize) -> Self {
        RestartLog { policy, intensity, children, restarts: VecDeque::new() }
    }

    /// Records that child `index` died at `now`, the time since any fixed moment. `now` must not
    /// decrease from call to call.
    pub fn died(&mut self, index: usize, now: Duration) -> Decision {
        let window_start = now.saturating_sub(self.intensity.within);
        while self.restarts.front().is_some_and(|restart| *restart < window_start) {
            self.restarts.pop_front();
        }
        if self.restarts.len() >= self.intensity.restarts_max {
            return Decision::GiveUp { restarts: self.restarts.len(), within: self.intensity.within };
        }
        let doubled = self.intensity.back_off.saturating_mul(2u32.saturating_pow(self.restarts.len() as u32));
        let after = doubled.min(BACK_OFF_MAX.max(self.intensity.back_off));
        self.restarts.push_back(now);
        let end = match self.policy {
            Policy::OneForOne => index + 1,
            Policy::RestForOne => self.children,
        };
        Decision::Restart { children: index..end, after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn log(policy: Policy) -> RestartLog {
        let intensity = Intensity { restarts_max: 2, within: 10 * SECOND, back_off: SECOND };
        RestartLog::new(policy, intensity, 3)
    }

    #[test]
    fn one_for_one_restarts_only_the_dead_child() {
        let decision = log(Policy::OneForOne).died(1, SECOND);
        assert_eq!(decision, Decision::Restart { children: 1..2, after: SECOND });
    }

    #[test]
    fn rest_for_one_also_restarts_later_siblings() {
        let mut log = log(Policy::RestForOne);
        assert_eq!(log.died(1, SECOND), Decision::Restart { children: 1..3, after: SECOND });
        assert_eq!(log.died(2, 2 * SECOND), Decision::Restart { children: 2..3, after: 2 * SECOND });
    }

    #[test]
    fn restart_delays_double_up_to_a_limit() {
        let intensity = Intensity { restarts_max: 100, within: 1000 * SECOND, back_off: SECOND };
        let mut log = RestartLog::new(Policy::OneForOne, intensity, 1);
        let waits = (0..50).map(|_| match log.died(0, SECOND) {
            Decision::Restart { after, .. } => after,
            decision => panic!("{decision:?}"),
        });
        let waits: Vec<_> = waits.collect();
        assert_eq!(waits[..4], [SECOND, 2 * SECOND, 4 * SECOND, 5 * SECOND]);
        assert_eq!(waits[49], 5 * SECOND);
    }

    #[test]
    fn a_crash_loop_gives_up_and_old_deaths_are_forgotten() {
        let mut log = log(Policy::OneForOne);
        log.died(0, SECOND);
        log.died(0, 2 * SECOND);
        assert_eq!(log.died(0, 3 * SECOND), Decision::GiveUp { restarts: 2, within: 10 * SECOND });
        // At 12 s the death at 1 s is out of the window.
        assert!(matches!(log.died(0, 12 * SECOND), Decision::Restart { .. }));
    }
}
