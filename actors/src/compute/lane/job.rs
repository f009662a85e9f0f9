//! What a lane is asked to do, and how it answers.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Bytes, Lease};
use bursar_kernels::{KernelError, UnseenToken, ops::copy_blocks::BlockCopy};
use bursar_model::{
    Depth,
    error::SamplingError,
    flow::{LogProbabilities, StepBatch, Token},
    registry::EncoderBatch,
    sampling::{Past, Sampler, Score},
    worst_cases::{Footprint, WorstCase},
};
use thiserror::Error;
use tracing::Span;

/// Why a job was not done.
#[derive(Debug, Error)]
pub enum LaneError {
    /// The lane's thread ended, with this job or before it.
    #[error("the lane has ended")]
    Gone,
    /// Too many jobs are queued.
    #[error("{limit} jobs are already waiting for the lane")]
    Full {
        /// The most jobs that may be queued.
        limit: usize,
    },
    /// An operation failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Called when a serving job was refused memory. It must not block.
pub type RefusalSink = Arc<dyn Fn(LaneError) + Send + Sync>;

/// Delivers the answer to a job: called exactly once, even on a panic. It must not block.
pub struct Answer<T>(Option<Deliver<T>>);

type Deliver<T> = Box<dyn FnOnce(Result<T, LaneError>) + Send>;

impl<T> Answer<T> {
    /// An answer that calls `deliver` with the outcome.
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

/// How one row's token is chosen.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The request's parameters.
    pub sampler: Arc<Sampler>,
    /// The index of this token in the sequence, so that a seed gives the same token in any batch and after any restart.
    pub position: u64,
    /// The tokens before it, if the sampler reads them.
    pub past: Option<PastTokens>,
}

/// The tokens before a position.
#[derive(Clone)]
pub struct PastTokens {
    /// The prompt tokens that the sampler [reads](Sampler::read_of).
    pub prompt: Arc<[u32]>,
    /// The tokens produced so far, as far as the host has seen them.
    pub produced: Vec<u32>,
    /// One more, if the sampler need not [see](Sampler::must_see) it.
    pub unseen: Option<UnseenToken>,
}

/// Shows counts, never the tokens, because they are the user's text.
impl std::fmt::Debug for PastTokens {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PastTokens({} of the prompt, {} produced)", self.prompt.len(), self.produced.len())
    }
}

impl Choice {
    /// The form that the sampler takes.
    pub(super) fn past(&self) -> Past<'_> {
        match &self.past {
            Some(PastTokens { prompt, produced, unseen }) => {
                let seen = Past::new(prompt, produced);
                unseen.map_or(seen, |unseen| seen.then(unseen))
            }
            None => Past::at(self.position),
        }
    }
}

/// The result of a step.
#[derive(Debug)]
pub struct Stepped {
    /// One token per row of logits. An error for a row that allows none; only its own sequence fails.
    pub chosen: Vec<Result<Token, SamplingError>>,
    /// Log-probabilities of the scored tokens, in the job's order. None where the logits are not numbers.
    pub scores: Vec<Option<LogProbabilities>>,
    /// Whether a captured graph ran it.
    pub is_by_graph: bool,
    /// How unevenly tokens were shared out among experts lately, if the lane has looked.
    pub imbalance: Option<f64>,
}

/// A step of the decoder.
pub struct StepJob {
    /// The arrays that the model reads.
    pub batch: StepBatch,
    /// One per row of logits.
    pub choices: Vec<Choice>,
    /// One per scored row.
    pub scores: Vec<Score>,
    /// Hold the vision cache's rows that the step reads until it has run, even if their actors die.
    pub pins: Vec<Arc<dyn Send + Sync>>,
    /// Spans of requests that record the step.
    pub spans: Vec<Span>,
    /// Where the result goes.
    pub answer: Answer<Stepped>,
}

/// A launch of the vision encoder.
pub struct EncodeJob {
    /// The pictures to encode.
    pub batch: Arc<EncoderBatch>,
    /// The leases of their pixels, held until the launch has run, even if their actors die.
    pub host: Vec<Arc<Lease>>,
    /// Spans of requests that record the launch.
    pub spans: Vec<Span>,
    /// Called when the embeddings are in the cache.
    pub answer: Answer<()>,
}

/// What is copied to host memory and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Blocks of keys and values, by the step lane.
    Blocks,
    /// Rows of the vision cache, by the vision lane.
    Rows,
}

/// Copies between the device and host memory. Only passes begun later wait for those to the host.
pub struct CopyJob {
    /// What is copied.
    pub of: Copied,
    /// What leaves the device. It is copied first.
    pub to_host: Vec<BlockCopy>,
    /// What comes back. No pass may use it before the answer.
    pub to_device: Vec<BlockCopy>,
    /// Where it goes how long the device took.
    pub answer: Answer<Duration>,
}

/// A worst case to run.
pub struct StressJob {
    /// The worst case.
    pub worst_case: Arc<WorstCase>,
    /// How many layers it runs through.
    pub depth: Depth,
    /// Where its measured footprint goes.
    pub answer: Answer<Footprint>,
}

/// A size of decode step to capture as a graph.
pub struct CaptureJob {
    /// The number of rows: one of the sizes.
    pub rows: usize,
    /// Where the size of its graphs goes, in bytes of the device that no lease pays for yet. None on a device without
    /// graphs.
    pub answer: Answer<Option<Bytes>>,
}

/// A job for a lane.
pub enum Job {
    /// Runs a step.
    Step(Box<StepJob>),
    /// Runs a launch.
    Encode(Box<EncodeJob>),
    /// Copies blocks or rows, beside passes.
    Copy(Box<CopyJob>),
    /// Runs a worst case.
    Stress(Box<StressJob>),
    /// Captures a graph.
    Capture(CaptureJob),
    /// Drops the graphs of this size, if there are any.
    Forget {
        /// The number of rows.
        rows: usize,
        /// Called when they are dropped.
        answer: Answer<()>,
    },
    /// Does nothing. It wakes the lane, so that it sees that it is being shut down.
    Wake,
    /// Makes the device refuse launches: of those after this job, `after` succeed, and then `count` fail; see
    /// [`FaultyBackend::fail_launches`](bursar_kernels::FaultyBackend::fail_launches).
    FailLaunches {
        /// Launches that still succeed.
        after: usize,
        /// Launches that are refused.
        count: usize,
    },
    /// Makes the next step, launch, worst case or capture fail for lack of memory, as when a GPU has none left for the
    /// driver itself; of several ranks, on the last one. Nothing of that job is begun there.
    Refuse,
    /// Makes the thread panic, as a bug would; of several ranks, the last one's. A failing job is only an answer and
    /// does not end the thread.
    Die,
}

impl LaneError {
    /// Whether the device refused memory, so that the same job may succeed once other work uses less.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, LaneError::Kernel(KernelError::Device(error)) if error.is_refused())
    }
}

impl Job {
    /// Whether a serving actor asks for it, in memory that it gave out. A successor of the actor waits for these jobs.
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
