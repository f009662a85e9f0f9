//! Jobs for a lane and their answers.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Bytes, Lease};
use bursar_kernels::{KernelError, UnseenToken, ops::copy_blocks::CopyLists};
use bursar_model::{
    Depth,
    error::SamplingError,
    flow::{FurtherDrafts, LogProbabilities, StepBatch, Token},
    registry::EncoderBatch,
    sampling::{Past, Sampler, Score},
    worst_cases::{Footprint, WorstCase},
};
use thiserror::Error;
use tracing::Span;

use crate::compute::graph::GraphKey;

#[derive(Debug, Error)]
pub enum LaneError {
    /// The lane's thread ended while it ran this job, or earlier.
    #[error("the lane has ended")]
    Gone,
    /// Too many jobs are queued.
    #[error("{limit} jobs are already waiting for the lane")]
    Full { limit: usize },
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// A callback that a lane calls when the device refused memory to a serving job. The callback must
/// not block.
pub type RefusalSink = Arc<dyn Fn(LaneError) + Send + Sync>;

/// A callback that delivers the answer to a job. The lane calls it exactly once, even if the lane
/// panics. The callback must not block.
pub struct Answer<T>(Option<Deliver<T>>);

type Deliver<T> = Box<dyn FnOnce(Result<T, LaneError>) + Send>;

impl<T> Answer<T> {
    /// Creates an answer that calls `deliver` with the outcome.
    pub fn to(deliver: impl FnOnce(Result<T, LaneError>) + Send + 'static) -> Self {
        Answer(Some(Box::new(deliver)))
    }

    pub(crate) fn give(mut self, outcome: Result<T, LaneError>) {
        if let Some(deliver) = self.0.take() {
            deliver(outcome);
        }
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(deliver) = self.0.take() {
            deliver(Err(LaneError::Gone));
        }
    }
}

/// The choice of a sequence's next token, and of the tokens after its drafts, up to the first draft
/// that differs from the sampler's choice.
#[derive(Clone, Debug)]
pub struct Choice {
    pub sampler: Arc<Sampler>,
    /// Index of the next token in the reply, so that a seed gives the same token in any batch
    /// and after any restart.
    pub position: u64,
    /// The tokens before `position`, if the sampler reads them.
    pub past: Option<PastTokens>,
    /// Tokens that are expected from `position` on. The step has a row of logits for the next
    /// token, and one after each draft.
    pub drafts: Vec<u32>,
    pub acceptance: Acceptance,
    /// The drafts that the draft head computes after its first draft. `None` if it computes no
    /// further drafts.
    pub further: Option<FurtherDrafts>,
}

/// The condition under which a draft is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Acceptance {
    /// The sampler has chosen the same token.
    #[default]
    Equal,
    /// A random decision with this probability, for measurements. An accepted draft replaces the
    /// sampled token in the reply.
    Synthetic(f64),
}

#[derive(Clone)]
pub struct PastTokens {
    /// The prompt tokens that the sampler [reads](Sampler::read_of).
    pub prompt: Arc<[u32]>,
    /// Tokens of the reply that the host has received so far, followed by the drafts.
    pub produced: Vec<u32>,
    /// One more token that the host has not received, if the sampler
    /// need not [see](Sampler::must_see) it.
    pub unseen: Option<UnseenToken>,
}

/// Prints counts and never the tokens, because they are the user's text.
impl std::fmt::Debug for PastTokens {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PastTokens({} of the prompt, {} produced)", self.prompt.len(), self.produced.len())
    }
}

impl Choice {
    /// The number of rows of logits.
    pub(super) fn rows(&self) -> usize {
        1 + self.drafts.len()
    }

    /// The past of each row. It contains the drafts before the row, because the row's token is used
    /// only if they were all chosen. Penalties therefore count them.
    pub(super) fn pasts(&self) -> impl Iterator<Item = Past<'_>> {
        (0..self.rows()).map(|row| match &self.past {
            Some(PastTokens { prompt, produced, unseen }) => {
                let seen = Past::new(prompt, &produced[..produced.len() - self.drafts.len() + row]);
                unseen.map_or(seen, |unseen| seen.then(unseen))
            }
            None => Past::at(self.position + row as u64),
        })
    }

    /// Takes the token chosen in each row, and returns the tokens that the reply uses: up to and
    /// including the first token that differs from its draft. The draft distribution gives each
    /// drafted token probability 1, so this method is rejection sampling (Leviathan et al., arXiv
    /// 2211.17192) without a residual: the sampler's own choice replaces the draft.
    pub(super) fn accepted<E>(&self, chosen: impl IntoIterator<Item = Result<Token, E>>) -> Vec<Result<Token, E>> {
        let mut drafts = self.drafts.iter();
        let (mut accepted, mut chosen) = (Vec::with_capacity(1), chosen.into_iter());
        loop {
            let mut token = chosen.next().expect("each row has an outcome");
            let expected = drafts.next();
            if let (Acceptance::Synthetic(rate), Some(draft), Ok(token)) = (self.acceptance, expected, &mut token) {
                if is_accepted(token.position, *draft, rate) {
                    token.id = *draft;
                } else if token.id == *draft {
                    token.id = draft.checked_sub(1).unwrap_or(1);
                }
            }
            let goes_on = token.as_ref().is_ok_and(|token| Some(&token.id) == expected);
            accepted.push(token);
            if !goes_on {
                return accepted;
            }
        }
    }
}

/// Returns `true` with probability `rate`. The result is always the same for the same draft at the
/// same position.
fn is_accepted(position: u64, draft: u32, rate: f64) -> bool {
    // SplitMix64 (Steele et al. 2014).
    let mut bits = (position << 32 | u64::from(draft)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ bits >> 31) >> 11) as f64 / (1_u64 << 53) as f64 <= rate
}

#[derive(Debug)]
pub struct Stepped {
    /// The tokens of each choice: one token, and one more for each accepted draft. The last entry
    /// is an error if its row allows no token. Such an error fails only its own sequence.
    pub chosen: Vec<Vec<Result<Token, SamplingError>>>,
    /// The drafts of the draft head after the last token of each choice. The outer list is empty
    /// without a draft head. The inner list of a choice is empty if the choice ended in an error.
    pub drafts: Vec<Vec<u32>>,
    /// Log-probabilities of the scored tokens, in the job's order. `None` where the logits are not
    /// numbers or the token does not exist.
    pub scores: Vec<Option<LogProbabilities>>,
    /// Whether a captured graph ran the step.
    pub is_by_graph: bool,
    /// Ratio of the tokens of the busiest expert to the average per expert since the last read, if
    /// the lane has read the counters with this step.
    pub imbalance: Option<f64>,
}

pub struct StepJob {
    /// The tokens and sequences of the step.
    pub batch: StepBatch,
    /// The choices of the sequences with rows of logits, in order.
    pub choices: Vec<Choice>,
    /// One score per scored row.
    pub scores: Vec<Score>,
    /// Pins that keep the vision cache rows that the step reads. The rows stay pinned until the
    /// step has run, even if the actors that requested the rows die.
    pub pins: Vec<Arc<dyn Send + Sync>>,
    /// Spans of the requests that record the step.
    pub spans: Vec<Span>,
    pub answer: Answer<Stepped>,
}

/// A batch for the vision encoder.
pub struct EncodeJob {
    pub batch: Arc<EncoderBatch>,
    /// Leases of the host memory with the pixels, held until the batch has run, even if the actors
    /// that submitted the batch die.
    pub host: Vec<Arc<Lease>>,
    /// Spans of the requests that record the batch.
    pub spans: Vec<Span>,
    /// Answered when the embeddings are in the vision cache.
    pub answer: Answer<()>,
}

/// The content that a job copies to host memory and back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Blocks of the KV cache and slots of states, copied by the step lane.
    Cache { blocks: CopyLists, states: CopyLists },
    /// Vision cache rows, copied by the vision lane.
    Rows(CopyLists),
}

/// Copies between the device and host memory, concurrent with passes. Passes that begin later wait
/// for the copies to the host; passes that are already running do not. No pass may use content
/// copied to the device before the answer arrives.
pub struct CopyJob {
    pub copied: Copied,
    /// Receives the time that the device took.
    pub answer: Answer<Duration>,
}

pub struct StressJob {
    pub worst_case: Arc<WorstCase>,
    /// The number of layers that the pass runs.
    pub depth: Depth,
    /// Receives the measured footprint.
    pub answer: Answer<Footprint>,
}

/// Captures decode steps of one size as CUDA graphs.
pub struct CaptureJob {
    /// One of the sizes of the lane's [`GraphLimits`](crate::compute::graph::GraphLimits).
    pub size: GraphKey,
    /// Receives the size of the graphs, in bytes of device memory that no lease pays for yet.
    /// `None` on a device without graphs.
    pub answer: Answer<Option<Bytes>>,
}

pub enum Job {
    /// Runs a step of the decoder.
    Step(Box<StepJob>),
    /// Runs a batch of the vision encoder.
    Encode(Box<EncodeJob>),
    /// Copies blocks or rows, concurrent with passes.
    Copy(Box<CopyJob>),
    /// Runs a worst case and measures its footprint.
    Stress(Box<StressJob>),
    /// Captures the graphs of one size.
    Capture(CaptureJob),
    /// Drops the graphs of this size, if they exist.
    Forget {
        size: GraphKey,
        /// Answered when the graphs are dropped.
        answer: Answer<()>,
    },
    /// Does nothing. The job wakes the lane, which then notices that it is being shut down.
    Wake,
    /// Makes the device refuse launches: `after` launches after this job succeed, and the `count`
    /// launches after them fail. With several ranks, only the last rank is affected. See
    /// [`FaultyBackend::fail_launches`](bursar_kernels::FaultyBackend::fail_launches).
    FailLaunches {
        /// Number of launches that still succeed.
        after: usize,
        /// Number of launches that are refused.
        count: usize,
    },
    /// Makes the next step, encoder batch, copy, worst case or capture fail for lack of memory, as
    /// when a GPU has no memory left for the driver itself. With several ranks, the job fails on
    /// the last rank, which launches no work of that job.
    Refuse,
    /// Makes the lane thread panic, as a bug would. With several ranks, the thread of the last rank
    /// panics. A job that only fails is answered with an error, and does not end the thread if
    /// there is only one rank.
    Die,
}

impl LaneError {
    /// Whether the device refused memory. The same job may succeed once other work uses less.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, LaneError::Kernel(KernelError::Device(error)) if error.is_refused())
    }
}

impl Job {
    /// Returns `true` if a serving actor submits this job. Such a job uses memory that the actor
    /// has assigned, so the successor of a dead actor waits for it.
    pub(super) fn is_served(&self) -> bool {
        matches!(self, Job::Step(_) | Job::Encode(_) | Job::Copy(_))
    }

    pub(super) fn fail(self, error: LaneError) {
        match self {
            Job::Step(job) => job.answer.give(Err(error)),
            Job::Encode(job) => job.answer.give(Err(error)),
            Job::Copy(job) => job.answer.give(Err(error)),
            Job::Stress(job) => job.answer.give(Err(error)),
            Job::Capture(job) => job.answer.give(Err(error)),
            Job::Forget { answer, .. } => answer.give(Err(error)),
            Job::Wake | Job::FailLaunches { .. } | Job::Refuse | Job::Die => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use bursar_model::sampling::SamplingParams;

    use super::*;

    #[test]
    fn tokens_count_up_to_the_first_that_was_not_drafted() {
        let sampler = Arc::new(Sampler::new(SamplingParams::default(), 100).expect("the parameters are valid"));
        let choice = Choice {
            sampler,
            position: 3,
            past: None,
            drafts: vec![5, 6],
            acceptance: Acceptance::Equal,
            further: None,
        };
        let token = |id| Ok::<_, &str>(Token { id, position: 3, log_probabilities: None });
        let accepted = |chosen: [Result<Token, &'static str>; 3]| {
            choice.accepted(chosen).into_iter().map(|token| token.map(|token| token.id)).collect::<Vec<_>>()
        };
        assert_eq!(accepted([token(5), token(6), token(7)]), [Ok(5), Ok(6), Ok(7)]);
        assert_eq!(accepted([token(5), token(9), token(7)]), [Ok(5), Ok(9)]);
        assert_eq!(accepted([token(6), token(6), token(7)]), [Ok(6)]);
        assert_eq!(accepted([token(5), Err("NaN"), token(7)]), [Ok(5), Err("NaN")]);
        let accepted_at = |rate: f64| -> usize {
            let of = |position| Choice { position, acceptance: Acceptance::Synthetic(rate), ..choice.clone() };
            let rows = |position| {
                (position..position + 3)
                    .map(move |position| Ok::<_, &str>(Token { position, ..token(8).expect("a token") }))
            };
            (0..10_000).map(|position| of(position).accepted(rows(position)).len() - 1).sum()
        };
        assert_eq!((accepted_at(0.0), accepted_at(1.0)), (0, 20_000));
        // Each step accepts 0.5 + 0.25 drafts on average. The sum has a standard deviation of 83.
        assert!((7_200..7_800).contains(&accepted_at(0.5)), "{} drafts were accepted", accepted_at(0.5));
        let positions: Vec<_> = choice.pasts().map(|past| past.position()).collect();
        assert_eq!(positions, [3, 4, 5]);
    }
}
