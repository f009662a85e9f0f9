//! The attempts of an engine, with a report of each.

use std::time::Duration;

use crate::profile::{AttemptReport, AttemptState, Attempts, Evidence, Outcome, Phase, ProfileError};

/// The attempts, with a report for each attempt that has ended and for the attempt that serves.
#[derive(Debug)]
pub struct AttemptLog {
    attempts: Attempts,
    reports: Vec<AttemptReport>,
}

/// The consequence of a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Another attempt follows after this wait.
    Again(Duration),
    /// The attempt was the last one.
    Last,
}

impl AttemptLog {
    /// Creates the log before the first attempt. If `is_pinned` is `true`, the user fixed the size
    /// of the KV cache, and the target never shrinks.
    pub fn new(is_pinned: bool) -> Self {
        AttemptLog { attempts: Attempts::new(is_pinned), reports: Vec::new() }
    }

    /// The number of the current attempt, from 0.
    pub fn number(&self) -> u32 {
        self.attempts.number()
    }

    /// The number of attempts so far that were refused memory. Attempts that relied on a recorded
    /// profile are not counted.
    pub fn shrinks(&self) -> u32 {
        self.attempts.shrinks()
    }

    /// The number of blocks that fit according to the first measurement, without the reductions
    /// after refusals of memory. `None` before the first measurement.
    pub fn measured(&self) -> Option<usize> {
        self.attempts.measured()
    }

    /// The number of blocks that the current attempt asks for. 0 if no number was planned or
    /// measured yet.
    pub fn target(&self) -> usize {
        self.attempts.target()
    }

    pub fn reports(&self) -> &[AttemptReport] {
        &self.reports
    }

    /// Records that `blocks` should fit according to the plan.
    pub fn plan(&mut self, blocks: usize) {
        self.attempts.plan(blocks);
    }

    /// Adds a report with the progress and outcome of the current attempt. An earlier report of the
    /// same attempt is replaced.
    pub fn report(&mut self, passed: &AttemptState, outcome: Outcome) -> AttemptReport {
        passed.measured.into_iter().for_each(|blocks| self.attempts.measure(blocks));
        let target = passed.target.unwrap_or_else(|| self.attempts.target());
        let report = self.attempts.report(target, passed.phase.unwrap_or(Phase::Load), outcome);
        self.reports.retain(|earlier| earlier.attempt != report.attempt);
        self.reports.push(report.clone());
        report
    }

    /// Records that the current attempt failed. Unless it was the last, an attempt that relied on a
    /// recorded profile is followed by an attempt that measures again, regardless of the error,
    /// because the new attempt may succeed.
    pub fn failed(&mut self, outcome: &Outcome, was_warm: bool, now: Duration) -> Verdict {
        let wait = if was_warm {
            self.attempts.forgone(now)
        } else {
            self.attempts.failed(matches!(outcome, Outcome::Refused { .. }), now)
        };
        let may_go_on = was_warm || !matches!(outcome, Outcome::Failed { .. });
        wait.filter(|_| may_go_on).map_or(Verdict::Last, Verdict::Again)
    }

    /// The latest evidence of refused memory. The last attempt may have failed with another error
    /// only because earlier refusals had made its KV cache too small. In that case, missing memory
    /// is the cause of that error too.
    pub fn last_evidence(&self) -> Option<&Evidence> {
        self.reports.iter().rev().find_map(|report| match &report.outcome {
            Outcome::Refused { evidence } => Some(evidence),
            _ => None,
        })
    }
}

/// The outcome of an attempt that made this progress and failed with `error`.
pub fn outcome_of(passed: &AttemptState, error: &ProfileError) -> Outcome {
    let message = error.to_string();
    match (passed.evidence.clone(), error.is_death()) {
        (Some(evidence), _) => Outcome::Refused { evidence },
        (None, true) => Outcome::Died { message },
        (None, false) => Outcome::Failed { message },
    }
}
