//! The attempts of an engine with a report of each.

use std::time::Duration;

use crate::profile::{AttemptReport, AttemptState, Attempts, Evidence, Outcome, Phase, ProfileError};

/// The attempts, and a report for each that has ended and for the one that serves.
#[derive(Debug)]
pub struct AttemptLog {
    attempts: Attempts,
    reports: Vec<AttemptReport>,
}

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Another attempt, after this wait.
    Again(Duration),
    /// It was the last.
    Last,
}

impl AttemptLog {
    /// Before the first attempt. A target that the user fixed never shrinks.
    pub fn new(is_pinned: bool) -> Self {
        AttemptLog { attempts: Attempts::new(is_pinned), reports: Vec::new() }
    }

    /// The number of the current attempt, from 0.
    pub fn number(&self) -> u32 {
        self.attempts.number()
    }

    /// Attempts so far that were refused memory.
    pub fn shrinks(&self) -> u32 {
        self.attempts.shrinks()
    }

    /// Blocks that an attempt found room for before any was refused.
    pub fn measured(&self) -> Option<usize> {
        self.attempts.measured()
    }

    /// Blocks that the current attempt asks for, as far as known.
    pub fn target(&self) -> usize {
        self.attempts.target()
    }

    /// The reports so far.
    pub fn reports(&self) -> &[AttemptReport] {
        &self.reports
    }

    /// The plan expects `blocks` to fit.
    pub fn plan(&mut self, blocks: usize) {
        self.attempts.plan(blocks);
    }

    /// Reports the current attempt as far as it got. An earlier report of it is replaced.
    pub fn report(&mut self, passed: &AttemptState, outcome: Outcome) -> AttemptReport {
        passed.measured.into_iter().for_each(|blocks| self.attempts.measure(blocks));
        let target = passed.target.unwrap_or_else(|| self.attempts.target());
        let report = self.attempts.report(target, passed.phase.unwrap_or(Phase::Load), outcome);
        self.reports.retain(|earlier| earlier.attempt != report.attempt);
        self.reports.push(report.clone());
        report
    }

    /// The current attempt failed in this way. An attempt that relied on a recorded profile is followed by one that
    /// measures anew, whatever its error was, because that may succeed.
    pub fn failed(&mut self, outcome: &Outcome, was_warm: bool, now: Duration) -> Verdict {
        let wait = if was_warm {
            self.attempts.forgone(now)
        } else {
            self.attempts.failed(matches!(outcome, Outcome::Refused { .. }), now)
        };
        let may_go_on = was_warm || !matches!(outcome, Outcome::Failed { .. });
        wait.filter(|_| may_go_on).map_or(Verdict::Last, Verdict::Again)
    }

    /// The latest evidence of refused memory. An attempt may be too small only because earlier ones were refused
    /// memory: it too ended for lack of memory.
    pub fn last_evidence(&self) -> Option<&Evidence> {
        self.reports.iter().rev().find_map(|report| match &report.outcome {
            Outcome::Refused { evidence } => Some(evidence),
            _ => None,
        })
    }
}

/// How an attempt ended that got this far and failed with `error`.
pub fn outcome_of(passed: &AttemptState, error: &ProfileError) -> Outcome {
    let said = error.to_string();
    match (passed.evidence.clone(), error.is_death()) {
        (Some(evidence), _) => Outcome::Refused { evidence },
        (None, true) => Outcome::Died { said },
        (None, false) => Outcome::Failed { said },
    }
}
