//! A job that has begun: what it has launched, how its results are read, and who waits for them.

use bursar_budgets::Bytes;
use bursar_kernels::{Backend, ops::argmax::NO_CHOICE, ops::transfer::Later};
use bursar_model::{
    corners::Footprint,
    error::SamplingError,
    flow::{LogProbabilities, Token},
};

use super::{
    Bench,
    job::{CaptureJob, Choice, EncodeJob, LaneError, StepJob, Stepped, StressJob},
};

/// What was launched of a job, and the job: what that holds stays until the device is past it.
pub(super) enum Pending {
    Step(Box<StepJob>, Result<Launched, LaneError>),
    Encode(Box<EncodeJob>, Result<Later<u32>, LaneError>),
    Stress(Box<StressJob>, Result<Footprint, LaneError>),
    Capture(CaptureJob, Result<Option<Bytes>, LaneError>),
    Nothing,
}

/// A step on the device.
pub(super) struct Launched {
    pub(super) choosing: Choosing,
    pub(super) scores: Vec<Option<LogProbabilities>>,
    pub(super) is_by_graph: bool,
}

/// Where a step's tokens are chosen.
pub(super) enum Choosing {
    /// On the device, where the next step finds them: here come the ids, one a row of logits.
    OnDevice(Later<u32>),
    /// On the host, from `[rows, vocabulary]` logits.
    OnHost { logits: Later<f32>, vocabulary: usize },
}

impl Pending {
    /// Whether [`finish`](Pending::finish) would return without waiting.
    pub(super) fn has_come(&self) -> bool {
        match self {
            Pending::Step(_, Ok(launched)) => launched.choosing.has_come(),
            Pending::Encode(_, Ok(moment)) => moment.has_come(),
            _ => true,
        }
    }

    /// Whether the next job may come before this one is answered: a step whose tokens the host need not know.
    pub(super) fn may_be_followed(&self) -> bool {
        matches!(self, Pending::Step(_, Ok(Launched { choosing: Choosing::OnDevice(_), .. })))
    }

    /// Waits until the device is past the job. Gives the call that answers it, to be made when the work counts as
    /// finished.
    pub(super) fn finish<B: Backend>(self, bench: &Bench<B>) -> Box<dyn FnOnce()> {
        match self {
            Pending::Step(job, launched) => {
                let outcome = launched.and_then(|launched| launched.finish(&job.choices, bench));
                Box::new(move || {
                    let StepJob { answer, .. } = *job;
                    answer.give(outcome);
                })
            }
            Pending::Encode(job, launched) => {
                let outcome = launched.and_then(|moment| Ok(moment.wait().map(drop)?));
                Box::new(move || job.answer.give(outcome))
            }
            Pending::Stress(job, outcome) => Box::new(move || job.answer.give(outcome)),
            Pending::Capture(job, outcome) => Box::new(move || job.answer.give(outcome)),
            Pending::Nothing => Box::new(|| {}),
        }
    }
}

impl Launched {
    fn finish<B: Backend>(self, choices: &[Choice], bench: &Bench<B>) -> Result<Stepped, LaneError> {
        let Launched { choosing, scores, is_by_graph } = self;
        Ok(Stepped { chosen: choosing.finish(choices, bench)?, scores, is_by_graph })
    }
}

impl Choosing {
    fn has_come(&self) -> bool {
        match self {
            Choosing::OnDevice(ids) => ids.has_come(),
            Choosing::OnHost { logits, .. } => logits.has_come(),
        }
    }

    /// A token a choice; an error for a row that allows none.
    fn finish<B: Backend>(
        self,
        choices: &[Choice],
        bench: &Bench<B>,
    ) -> Result<Vec<Result<Token, SamplingError>>, LaneError> {
        match self {
            Choosing::OnDevice(ids) => {
                let chosen = ids.wait()?.into_iter().zip(choices).map(|(id, choice)| match id {
                    NO_CHOICE => Err(SamplingError::NotNumbers),
                    id => Ok(Token { id, position: choice.position, log_probabilities: None }),
                });
                Ok(chosen.collect())
            }
            Choosing::OnHost { logits, vocabulary } => {
                let logits = logits.wait()?;
                let mut scratch = bench.scratch.borrow_mut();
                let rows = logits.chunks_exact(vocabulary).zip(choices);
                Ok(rows.map(|(row, choice)| choice.sampler.sample(row, choice.past(), &mut scratch)).collect())
            }
        }
    }
}
