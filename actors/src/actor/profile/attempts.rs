//! Pure: outcomes of the attempts to size a model, and the decision whether there is another
//! attempt.

use std::time::Duration;

use bursar_kernels::BLOCK_TOKENS;
use serde::Serialize;

use super::{Evidence, Phase, core::ATTEMPTS, core::shrunk};
use crate::supervise::{Decision, Policy, RestartLog};

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    Ready,
    /// Memory was refused. The next attempt asks for less, unless the user fixed the size.
    Refused {
        evidence: Evidence,
    },
    /// The attempt's actor died. The next attempt asks for the same size.
    Died {
        #[serde(rename = "said")]
        message: String,
    },
    /// A failure that another attempt would not change.
    Failed {
        #[serde(rename = "said")]
        message: String,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttemptReport {
    /// The attempt's number, from 1.
    pub attempt: u32,
    /// KV cache size in tokens that the attempt asked for. If the attempt ended before it asked,
    /// this is the size that it would have asked for.
    pub target_tokens: usize,
    /// The last phase that the attempt reached.
    pub phase: Phase,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// The attempts of one engine: the attempts of its start, and one more attempt each time that
/// memory is refused while the model serves.
#[derive(Debug)]
pub struct Attempts {
    ended: u32,
    /// Number of ended attempts that were refused memory. Attempts that relied on a recorded
    /// profile are not counted.
    shrinks: u32,
    /// KV blocks of the first target: the planned number until an attempt has measured the
    /// available memory, then the measured number.
    first: Option<First>,
    is_pinned: bool,
    /// Times of failed attempts. They limit how many further attempts are allowed.
    log: RestartLog,
}

#[derive(Clone, Copy, Debug)]
struct First {
    blocks: usize,
    is_measured: bool,
}

impl Attempts {
    /// Returns the state before the first attempt. `is_pinned` means that the user fixed the
    /// target, which then never shrinks.
    pub fn new(is_pinned: bool) -> Self {
        Attempts { ended: 0, shrinks: 0, first: None, is_pinned, log: RestartLog::new(Policy::OneForOne, ATTEMPTS, 1) }
    }

    /// Returns the number of the current attempt, from 0.
    pub fn number(&self) -> u32 {
        self.ended
    }

    /// Returns the number of attempts so far that were refused memory.
    pub fn shrinks(&self) -> u32 {
        self.shrinks
    }

    /// Returns the KV cache size that the first measurement yielded, in blocks. Returns `None`
    /// before the first measurement.
    pub fn measured(&self) -> Option<usize> {
        self.first.filter(|first| first.is_measured).map(|first| first.blocks)
    }

    /// Sets the planned number of blocks, unless a planned or measured number is already known.
    pub fn plan(&mut self, blocks: usize) {
        self.first.get_or_insert(First { blocks, is_measured: false });
    }

    /// Sets the measured number of blocks. Only the first measurement counts.
    pub fn measure(&mut self, blocks: usize) {
        if self.measured().is_none() {
            self.first = Some(First { blocks, is_measured: true });
        }
    }

    /// Returns the KV blocks that the current attempt asks for, or 0 before a planned or measured
    /// number is known.
    pub fn target(&self) -> usize {
        let shrinks = if self.is_pinned { 0 } else { self.shrinks };
        self.first.map_or(0, |first| shrunk(first.blocks, shrinks))
    }

    /// Returns the report of the current attempt, which asked for `target` blocks.
    pub fn report(&self, target: usize, phase: Phase, outcome: Outcome) -> AttemptReport {
        AttemptReport { attempt: self.ended + 1, target_tokens: target * BLOCK_TOKENS, phase, outcome }
    }

    /// Records that the current attempt failed at `now`, a time since any fixed moment. Returns the
    /// wait before the next attempt, or `None` if this attempt was the last. After a memory refusal
    /// the wait is zero, because waiting would not help.
    ///
    /// For an attempt that relied on a recorded profile, see [`forgone`](Self::forgone).
    pub fn failed(&mut self, was_refused: bool, now: Duration) -> Option<Duration> {
        self.ended += 1;
        self.shrinks += u32::from(was_refused);
        match self.log.died(0, now) {
            Decision::Restart { .. } if was_refused => Some(Duration::ZERO),
            Decision::Restart { after, .. } => Some(after),
            Decision::GiveUp { .. } => None,
        }
    }

    /// Records that the current attempt, which relied on a recorded profile, failed at `now`. The
    /// next attempt measures again and asks for all the memory that it finds. Returns a wait of
    /// zero, or `None` if this attempt was the last.
    pub fn forgone(&mut self, now: Duration) -> Option<Duration> {
        self.ended += 1;
        self.first.iter_mut().for_each(|first| first.is_measured = false);
        matches!(self.log.died(0, now), Decision::Restart { .. }).then_some(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn at_most_four_attempts_request_five_percent_less_each_time() {
        let mut attempts = Attempts::new(false);
        attempts.plan(1000);
        let mut targets = Vec::new();
        let mut now = Duration::ZERO;
        loop {
            targets.push(attempts.target());
            now += SECOND;
            match attempts.failed(true, now) {
                Some(wait) => assert_eq!(wait, Duration::ZERO),
                None => break,
            }
        }
        assert_eq!(targets, [1000, 950, 902, 857]);
    }

    #[test]
    fn a_pinned_target_is_not_lowered_by_refusals() {
        let mut attempts = Attempts::new(true);
        attempts.plan(64);
        attempts.failed(true, SECOND);
        assert_eq!((attempts.target(), attempts.shrinks()), (64, 1));
    }

    #[test]
    fn deaths_delay_the_next_attempt_and_keep_its_target() {
        let mut attempts = Attempts::new(false);
        attempts.plan(1000);
        assert_eq!(attempts.failed(false, SECOND), Some(Duration::from_millis(10)));
        assert_eq!(attempts.failed(true, SECOND), Some(Duration::ZERO));
        assert_eq!(attempts.failed(false, SECOND), Some(Duration::from_millis(40)));
        assert_eq!((attempts.number(), attempts.shrinks(), attempts.target()), (3, 1, 950));
        assert_eq!(attempts.failed(false, SECOND), None);
    }

    #[test]
    fn the_first_measurement_replaces_the_planned_target_permanently() {
        let mut attempts = Attempts::new(false);
        assert_eq!(attempts.target(), 0);
        attempts.plan(100);
        attempts.failed(true, SECOND);
        attempts.measure(200);
        attempts.plan(300);
        attempts.measure(400);
        assert_eq!((attempts.measured(), attempts.target()), (Some(200), 190));
    }

    #[test]
    fn old_refusals_lower_the_target_but_do_not_end_a_start() {
        let mut attempts = Attempts::new(false);
        attempts.plan(1000);
        for hour in [0, 2, 4, 6, 8] {
            assert!(attempts.failed(true, SECOND * 3600 * hour).is_some());
        }
        assert_eq!(attempts.target(), 773, "five reductions of five percent");
    }

    #[test]
    fn a_stale_profile_counts_as_an_attempt_without_lowering_the_next() {
        let mut attempts = Attempts::new(false);
        attempts.plan(1000);
        attempts.measure(900);
        assert_eq!(attempts.forgone(SECOND), Some(Duration::ZERO));
        assert_eq!((attempts.number(), attempts.shrinks(), attempts.measured()), (1, 0, None));
        attempts.plan(1000);
        let mut targets = Vec::new();
        loop {
            attempts.measure(800);
            targets.push(attempts.target());
            if attempts.failed(true, SECOND).is_none() {
                break;
            }
        }
        assert_eq!(targets, [800, 760, 722], "four attempts in all");
    }

    #[test]
    fn report_numbers_start_at_one() {
        let attempts = Attempts::new(false);
        let report = attempts.report(3, Phase::Validate, Outcome::Ready);
        let json = serde_json::to_string(&report).expect("the report serializes");
        assert_eq!(json, r#"{"attempt":1,"target_tokens":48,"phase":"validate","outcome":"ready"}"#);
    }
}
