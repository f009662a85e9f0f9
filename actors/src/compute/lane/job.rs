//! What a lane is asked to do, and how it answers.

use std::sync::Arc;

use bursar_budgets::{Bytes, Lease};
use bursar_kernels::KernelError;
use bursar_model::{
    Depth,
    error::SamplingError,
    flow::{LogProbabilities, StepBatch, Token},
    registry::PictureBatch,
    sampling::{Past, Sampler, Score},
    worst_cases::{Footprint, WorstCase},
};
use thiserror::Error;
use tracing::Span;

/// A job that was not done.
#[derive(Debug, Error)]
pub enum LaneError {
    /// The lane's thread has ended, with this job or before it.
    #[error("the lane has ended")]
    Gone,
    /// Too many jobs wait.
    #[error("{limit} jobs wait for the lane already")]
    Full {
        /// How many may.
        limit: usize,
    },
    /// An operation failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Hears that a job of what serves was refused memory; it must not block.
pub type RefusalSink = Arc<dyn Fn(LaneError) + Send + Sync>;

/// Where the answer to a job goes: called once, whatever happens. It must not block.
pub struct Answer<T>(Option<Deliver<T>>);

type Deliver<T> = Box<dyn FnOnce(Result<T, LaneError>) + Send>;

impl<T> Answer<T> {
    /// Calls `deliver` with the outcome.
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
    /// Which of the sequence's tokens this is: a seed repeats, whatever the batch or a restart.
    pub position: u64,
    /// What stands before it, if the sampler reads that.
    pub past: Option<PastTokens>,
}

/// A copy of what stands before a token.
#[derive(Clone)]
pub struct PastTokens {
    /// What the sampler [reads](Sampler::read_of) of the prompt.
    pub prompt: Arc<[u32]>,
    /// The tokens produced so far. The last may be [`PREVIOUS`](bursar_kernels::ops::embed::PREVIOUS)` | row`, which the step
    /// before is still to choose, for a sampler that need not [see](Sampler::must_see) it.
    pub produced: Vec<u32>,
}

/// Counts, never the tokens: they are the user's text.
impl std::fmt::Debug for PastTokens {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PastTokens({} of the prompt, {} produced)", self.prompt.len(), self.produced.len())
    }
}

impl Choice {
    /// As the sampler takes it.
    pub(super) fn past(&self) -> Past<'_> {
        match &self.past {
            Some(PastTokens { prompt, produced }) => Past::new(prompt, produced),
            None => Past::at(self.position),
        }
    }
}

/// What a step yields.
#[derive(Debug)]
pub struct Stepped {
    /// The chosen tokens, one a row of logits; an error for a row that allows none, which is its own sequence's
    /// misfortune.
    pub chosen: Vec<Result<Token, SamplingError>>,
    /// Log-probabilities of the scored tokens, in the job's order; none where the logits are not numbers.
    pub scores: Vec<Option<LogProbabilities>>,
    /// It was run by a captured graph.
    pub is_by_graph: bool,
}

/// A step of the decoder.
pub struct StepJob {
    /// The arrays.
    pub batch: StepBatch,
    /// One a row of logits.
    pub choices: Vec<Choice>,
    /// One a scored row.
    pub scores: Vec<Score>,
    /// Hold the rows of the vision cache that it reads until it has run, whoever dies meanwhile.
    pub pins: Vec<Arc<dyn Send + Sync>>,
    /// Requests that are told of it, as `tracing` knows them.
    pub spans: Vec<Span>,
    /// What came of it.
    pub answer: Answer<Stepped>,
}

/// A launch of the vision encoder.
pub struct EncodeJob {
    /// The pictures.
    pub batch: PictureBatch,
    /// Pay for their pixels until it has run, whoever dies meanwhile.
    pub host: Vec<Arc<Lease>>,
    /// Requests that are told of it, as `tracing` knows them.
    pub spans: Vec<Span>,
    /// They are in the cache.
    pub answer: Answer<()>,
}

/// A worst case.
pub struct StressJob {
    /// What is run.
    pub worst_case: Arc<WorstCase>,
    /// Through how many layers.
    pub depth: Depth,
    /// What it took.
    pub answer: Answer<Footprint>,
}

/// Decoding of so many rows, to be captured as a graph.
pub struct CaptureJob {
    /// How many: one of the buckets.
    pub rows: usize,
    /// What the graph takes of the device's memory, beside any lease yet; none where there are no graphs.
    pub answer: Answer<Option<Bytes>>,
}

/// Anything a lane can do.
pub enum Job {
    /// A step.
    Step(Box<StepJob>),
    /// A launch.
    Encode(Box<EncodeJob>),
    /// A worst case.
    Stress(Box<StressJob>),
    /// A graph.
    Capture(CaptureJob),
    /// The graph of so many rows goes, if there is one.
    Forget {
        /// How many.
        rows: usize,
        /// It is gone.
        answer: Answer<()>,
    },
    /// Nothing; it rings the bell of a lane that is to look up.
    Wake,
    /// Of the launches behind this, `after` go well, and then the device refuses `count`; see
    /// [`Backend::fail_launches`](bursar_kernels::Backend::fail_launches).
    FailLaunches {
        /// How many go well.
        after: usize,
        /// How many are refused.
        count: usize,
    },
    /// The next step, launch, worst case or graph is refused memory, as a launch is on a GPU that has none left for the
    /// driver itself, on every device. Nothing of the job is begun.
    Refuse,
    /// The thread dies of a panic, as it would of a bug. A job that fails is an answer and no death.
    Die,
}

impl LaneError {
    /// Whether the device refused memory: what is asked of it again, with less elsewhere, may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, LaneError::Kernel(KernelError::Device(error)) if error.is_refused())
    }
}

impl Job {
    /// Whether a serving actor asks for it, in memory that it gave out. A successor of the actor waits for these.
    pub(super) fn is_served(&self) -> bool {
        matches!(self, Job::Step(_) | Job::Encode(_))
    }

    pub(super) fn fail(self, error: LaneError) {
        match self {
            Job::Step(job) => job.answer.give(Err(error)),
            Job::Encode(job) => job.answer.give(Err(error)),
            Job::Stress(job) => job.answer.give(Err(error)),
            Job::Capture(job) => job.answer.give(Err(error)),
            Job::Forget { answer, .. } => answer.give(Err(error)),
            Job::Wake | Job::FailLaunches { .. } | Job::Refuse | Job::Die => {}
        }
    }
}
