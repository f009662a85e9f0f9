//! A job that has begun: its launched work, the decoding of its results, and the
//! delivery of its answer.

use bursar_budgets::Bytes;
use bursar_kernels::{Backend, ops::transfer::Later};
use bursar_model::{sampling::Scored, worst_cases::Footprint};
use tracing::{Span, debug, warn};

use super::{
    ModelRunner,
    choosing::Chosen,
    drafting::Drafting,
    job::{Answer, CaptureJob, EncodeJob, LaneError, StepJob, Stepped, StressJob},
};
use crate::compute::expert_loads::PendingLoads;

/// A job and its launched work. Everything that the job holds stays alive until the device
/// has completed the work.
pub(super) enum Pending {
    Step(Box<StepJob>, Result<RunningStep, LaneError>),
    Encode(Box<EncodeJob>, Result<Later<u32>, LaneError>),
    Stress(Box<StressJob>, Result<Footprint, LaneError>),
    Capture(CaptureJob, Result<Option<Bytes>, LaneError>),
    Forgotten(Answer<()>),
    Nothing,
}

/// A step that runs on the device.
pub(super) struct RunningStep {
    pub(super) choosing: Chosen,
    /// `None` if the step has no draft head.
    pub(super) drafting: Option<Drafting>,
    /// `None` if no token is scored.
    pub(super) scores: Option<Scored>,
    pub(super) is_by_graph: bool,
    /// Counts of how often each expert was chosen, if a read was due.
    pub(super) loads: Option<PendingLoads>,
}

impl Pending {
    /// Whether [`finish`](Pending::finish) would return without waiting.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            Pending::Step(_, Ok(launched)) => launched.is_ready(),
            Pending::Encode(_, Ok(moment)) => moment.is_ready(),
            _ => true,
        }
    }

    /// Returns `true` if the next job may begin before this one is answered. This is the case for a
    /// step, whose tokens stay on the device for the next step, and for an encoder batch.
    pub(super) fn may_be_followed(&self) -> bool {
        matches!(self, Pending::Step(_, Ok(_)) | Pending::Encode(_, Ok(_)))
    }

    /// Waits until the device has completed the job. This includes work that a failed job had
    /// launched, because that work still uses memory that the job holds. Returns the closure that
    /// answers the job. The caller runs it once the job counts as finished.
    pub(super) fn finish<B: Backend>(self, runner: &ModelRunner<B>) -> Box<dyn FnOnce()> {
        match self {
            Pending::Step(job, launched) => {
                let outcome = runner.past(launched.and_then(|launched| launched.finish(&job, runner)));
                log_outcome(&job.spans, &outcome, "step finished");
                Box::new(move || {
                    let StepJob { answer, .. } = *job;
                    answer.give(outcome);
                })
            }
            Pending::Encode(job, launched) => {
                let outcome = runner.past(launched.and_then(|moment| Ok(moment.wait().map(drop)?)));
                log_outcome(&job.spans, &outcome, "pictures encoded");
                Box::new(move || job.answer.give(outcome))
            }
            Pending::Stress(job, outcome) => {
                let outcome = runner.past(outcome);
                Box::new(move || job.answer.give(outcome))
            }
            Pending::Capture(job, outcome) => {
                let outcome = runner.past(outcome);
                Box::new(move || job.answer.give(outcome))
            }
            Pending::Forgotten(answer) => Box::new(move || answer.give(Ok(()))),
            Pending::Nothing => Box::new(|| {}),
        }
    }

    /// Whether a serving actor submitted the job; see `Job::is_served`.
    pub(super) fn is_served(&self) -> bool {
        matches!(self, Pending::Step(..) | Pending::Encode(..))
    }
}

/// Records a job's outcome in the spans of its requests.
fn log_outcome<T>(spans: &[Span], outcome: &Result<T, LaneError>, done: &'static str) {
    for span in spans {
        span.in_scope(|| match outcome {
            Ok(_) => debug!("{done}"),
            Err(error) => warn!(%error, "the lane failed"),
        });
    }
}

impl RunningStep {
    fn is_ready(&self) -> bool {
        self.choosing.is_ready()
            && self.drafting.as_ref().is_none_or(Drafting::is_ready)
            && self.scores.as_ref().is_none_or(Scored::is_ready)
            && self.loads.as_ref().is_none_or(PendingLoads::is_ready)
    }

    fn finish<B: Backend>(self, job: &StepJob, runner: &ModelRunner<B>) -> Result<Stepped, LaneError> {
        let RunningStep { choosing, drafting, scores, is_by_graph, loads } = self;
        let chosen = choosing.finish(&job.choices)?;
        let drafts = drafting.map(|drafting| drafting.finish(&job.choices, &chosen)).transpose()?.unwrap_or_default();
        let scores = scores.map(|scores| scores.finish(&job.scores)).transpose()?.unwrap_or_default();
        let counts = loads.map(PendingLoads::wait).transpose()?;
        let imbalance = runner.loads.as_ref().zip(counts).and_then(|(loads, now)| loads.borrow_mut().imbalance(now));
        Ok(Stepped { chosen, drafts, scores, is_by_graph, imbalance })
    }
}
