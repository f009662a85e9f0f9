//! The model runner of a lane: a backend, a workspace, the model and the caches.

use std::{
    cell::{Cell, RefCell},
    mem,
    sync::Arc,
    time::Instant,
};

use bursar_budgets::{DeviceError, Segment, Workspace};
use bursar_kernels::{Backend, FaultyBackend, KernelError, Rank, Scope, Tensor, WorkCounter, sampling::SampleBatch};
use bursar_model::{
    Depth, Model,
    blocks::decoder::StepCaches,
    sampling::{SamplingBuffers, Scores},
    worst_cases::{self, Footprint, Pass},
};
use tracing::warn;

use super::{
    choosing::{TokenChoice, logits_of},
    graphs::Graphs,
    job::{Job, LaneError, StepJob},
    pending::{Pending, RunningStep},
};
use crate::{
    compute::{
        expert_loads::{ExpertLoads, PendingLoads},
        memory::EngineMemory,
    },
    supervise::InjectedFault,
};

/// Runs the jobs of a lane. The lane's thread owns the runner.
pub struct ModelRunner<B> {
    /// Dropped first, because graphs use all fields below.
    pub(super) graphs: Graphs,
    pub(super) backend: FaultyBackend<B>,
    pub(super) workspace: Workspace,
    pub(super) model: Arc<Model>,
    pub(super) memory: Arc<EngineMemory>,
    /// Reused buffer for sampling parameters during upload. The past tokens of hundreds
    /// of sequences take megabytes.
    pub(super) question: Cell<Vec<u32>>,
    /// Whether the next job fails as if the device had refused memory.
    refuses: Cell<bool>,
    is_apart: Cell<bool>,
    /// `None` for a model without experts.
    pub(super) loads: Option<RefCell<ExpertLoads>>,
}

impl<B: Backend> ModelRunner<B> {
    /// Creates a runner that computes with `backend` in `workspace`, which must belong to `memory`.
    pub fn new(backend: B, workspace: Arc<Segment>, model: Arc<Model>, memory: Arc<EngineMemory>) -> Self {
        let workspace = Workspace::of_rank(workspace, model.rank().index());
        let (question, refuses, is_apart) = (Cell::default(), Cell::default(), Cell::default());
        let backend = FaultyBackend::over(backend);
        let loads = model.expert_loads().map(|loads| ExpertLoads::new(loads.columns(), Instant::now()).into());
        ModelRunner { graphs: Graphs::default(), backend, workspace, model, memory, question, refuses, is_apart, loads }
    }

    pub(super) fn rank(&self) -> Rank {
        self.model.rank()
    }

    /// Launches all work of a job without waiting for the device. Later jobs run after it.
    /// Only a job that needs intermediate results waits for the device here, such as a
    /// worst case under stress.
    pub(super) fn begin(&self, job: Job) -> Pending {
        match job {
            Job::Step(job) => {
                let launched = self.unless_refused(|| {
                    let launched = self.step(&job)?;
                    Ok(RunningStep { loads: self.look_at_experts()?, ..launched })
                });
                Pending::Step(job, launched)
            }
            Job::Encode(job) => {
                let launched = self.unless_refused(|| {
                    self.pass(|scope, cache| {
                        self.model.encode(scope, &job.batch, cache)?;
                        Ok(scope.moment()?)
                    })
                });
                Pending::Encode(job, launched)
            }
            Job::Copy(_) => unreachable!("copies are begun beside other jobs"),
            Job::Stress(job) => {
                let outcome = self.unless_refused(|| self.stress(&job.worst_case.pass, job.depth));
                Pending::Stress(job, outcome)
            }
            Job::Capture(job) => {
                let outcome = self.unless_refused(|| self.capture(job.rows));
                Pending::Capture(job, outcome)
            }
            Job::Forget { rows, answer } => {
                self.graphs.forget(rows);
                Pending::Forgotten(answer)
            }
            Job::Wake => Pending::Nothing,
            Job::FailLaunches { after, count } => {
                self.backend.fail_launches(after, count);
                Pending::Nothing
            }
            Job::Refuse => {
                self.refuses.set(true);
                Pending::Nothing
            }
            Job::Die => panic!("{InjectedFault}"),
        }
    }

    /// Waits until the device has completed all work launched here. Returns at once if
    /// the device is lost.
    pub(super) fn wait_for_device(&self) {
        drop(self.backend.wait_for_all());
    }

    /// Returns the outcome. After a failed job it is unknown which work is still running, so this
    /// waits for the device first. If the ranks are out of step although no device is lost, this
    /// lane cannot continue and stops, and a new lane can take its place.
    pub(super) fn past<T>(&self, outcome: Result<T, LaneError>) -> Result<T, LaneError> {
        outcome.map_err(|error| {
            self.wait_for_device();
            let device = self.workspace.segment().map(|segment| segment.device());
            let error = match (error, device) {
                (LaneError::Kernel(KernelError::Device(error)), Some(device)) => {
                    KernelError::Device(error.on_rank(&**device, self.rank().index())).into()
                }
                (error, _) => error,
            };
            let is_lost = matches!(&error, LaneError::Kernel(KernelError::Device(error)) if error.is_lost());
            if !is_lost || self.rank().of() == 1 || device.is_none_or(|device| device.check().is_err()) {
                return error;
            }
            warn!(%error, "the lane of rank {} stops", self.rank().index());
            self.is_apart.set(true);
            LaneError::Gone
        })
    }

    /// Returns `true` if this rank is out of step with the other ranks and can no longer take part
    /// in collectives.
    pub(super) fn is_apart(&self) -> bool {
        self.is_apart.get()
    }

    /// Runs `run`, unless an injected fault refuses memory to it. If `run` fails on one of several
    /// linked ranks, the other ranks may be at any point of the same work. The failed rank then
    /// stops, and aborts the collectives so that the other ranks stop too.
    pub(super) fn unless_refused<T>(&self, run: impl FnOnce() -> Result<T, LaneError>) -> Result<T, LaneError> {
        let outcome = if self.refuses.take() { self.refused() } else { self.past_on_panic(run) };
        if outcome.is_err() && self.backend.rank().of() > 1 {
            self.backend.abort_collectives();
            self.is_apart.set(true);
        }
        outcome
    }

    fn refused<T>(&self) -> Result<T, LaneError> {
        let device = self.workspace.segment().map(|segment| segment.device());
        let free = device.and_then(|device| device.memory().ok()).map(|memory| memory.free).unwrap_or_default();
        let asked = device.map(|device| device.page()).unwrap_or_default();
        let hint = "this error was injected by a drill; ask again".to_owned();
        Err(KernelError::Device(DeviceError::Refused { asked, free, hint }).into())
    }

    /// Runs `run`. If it panics, this waits for the device before the job is dropped, because
    /// launched work still uses memory that the job holds.
    fn past_on_panic<T>(&self, run: impl FnOnce() -> T) -> T {
        let past = PastOnDrop(self);
        let given = run();
        mem::forget(past);
        given
    }

    fn step(&self, job: &StepJob) -> Result<RunningStep, LaneError> {
        if let Some(launched) = self.decode_alone(job) {
            return launched;
        }
        let (choosing, scores) = self.pass(|scope, cache| {
            let layers = self.memory.kv.layers(self.rank());
            let mut buffers = self.memory.sampling.buffers(self.rank());
            let caches = StepCaches { layers: &layers, pictures: Some(cache), previous: &buffers.chosen() };
            let mut scores = Scores::begin(scope, &job.scores, buffers.shape().vocabulary)?;
            let of = logits_of(&job.choices);
            // [logit_rows, vocabulary or own tokens]
            let logits = self.model.step(scope, &job.batch, &caches, of, |scope, rows| scores.score(scope, rows))?;
            let scores = scores.download(scope)?;
            let rows = logits.rows();
            // The choices are built after the layers are launched, so that the device computes
            // while the host builds masks.
            let choices = TokenChoice::of(&job.choices, buffers.shape().vocabulary);
            match &choices {
                TokenChoice::Likeliest { .. } => buffers.take_likeliest(scope, &logits)?,
                TokenChoice::Asked(asked) => {
                    self.ask(scope, &mut buffers, &asked.batch, rows)?;
                    buffers.choose(scope, &logits)?;
                }
            }
            Ok((choices.download(scope, &buffers, rows)?, scores))
        })?;
        Ok(RunningStep { choosing, scores, is_by_graph: false, loads: None })
    }

    /// Starts the download of how often each expert was chosen, if a read is due.
    fn look_at_experts(&self) -> Result<Option<PendingLoads>, LaneError> {
        let (Some(loads), Some(counters)) = (&self.loads, self.model.expert_loads()) else { return Ok(None) };
        if !loads.borrow_mut().is_due(Instant::now()) {
            return Ok(None);
        }
        self.pass(|scope, _| Ok(Some(scope.download_later(counters)?)))
    }

    /// Writes the sampling parameters of `rows` rows to the sampling buffers.
    pub(super) fn ask(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        buffers: &mut SamplingBuffers<'_>,
        asked: &SampleBatch,
        rows: usize,
    ) -> Result<(), KernelError> {
        let mut words = self.question.take();
        asked.pack(rows, &mut words);
        let uploaded = buffers.ask(scope, &words);
        self.question.set(words);
        uploaded
    }

    fn stress(&self, pass: &Pass, depth: Depth) -> Result<Footprint, LaneError> {
        self.autotune(|| self.stress_autotuned(pass, depth))
    }

    /// Runs work whose results are discarded. Then the backend measures the GEMMs that it
    /// encountered, in the workspace that the work has released.
    pub(super) fn autotune<T>(&self, run: impl FnOnce() -> Result<T, LaneError>) -> Result<T, LaneError> {
        self.backend.autotune(true);
        let outcome = run().and_then(|given| {
            let counter = WorkCounter::default();
            Scope::new(&self.backend, &self.workspace, &counter).measure_products()?;
            Ok(given)
        });
        self.backend.autotune(false);
        outcome
    }

    fn stress_autotuned(&self, pass: &Pass, depth: Depth) -> Result<Footprint, LaneError> {
        self.workspace.reset_high_water();
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        let layers = self.memory.kv.layers(self.rank());
        let mut buffers = self.memory.sampling.buffers(self.rank());
        self.with_cache(|cache| Ok(worst_cases::run(&self.model, &scope, pass, depth, &layers, cache, &mut buffers)?))?;
        Ok(Footprint { workspace: self.workspace.high_water(), work: counter.total() })
    }

    pub(super) fn pass<T>(
        &self,
        run: impl FnOnce(&Scope<'_, FaultyBackend<B>>, &mut Tensor<'_>) -> Result<T, LaneError>,
    ) -> Result<T, LaneError> {
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        self.with_cache(|cache| run(&scope, cache))
    }

    fn with_cache<T>(&self, run: impl FnOnce(&mut Tensor<'_>) -> Result<T, LaneError>) -> Result<T, LaneError> {
        let outcome = match &self.memory.vision_cache {
            Some(cache) => run(&mut cache.tensor(self.rank())),
            None => {
                let (activation, row) = (self.backend.target().activation(), self.model.config().embedding_layout());
                // SAFETY: the tensor has 0 rows, so no element of it can be read or written.
                let mut none = unsafe { Tensor::persistent(self.workspace.address(), [0, row.width()], activation) };
                run(&mut none)
            }
        };
        // Results computed on a device that was lost in the meantime are worthless.
        let device = self.workspace.segment().map(|segment| segment.device().check());
        device.unwrap_or(Ok(())).map_err(KernelError::Device)?;
        outcome
    }
}

struct PastOnDrop<'b, B: Backend>(&'b ModelRunner<B>);

impl<B: Backend> Drop for PastOnDrop<'_, B> {
    fn drop(&mut self) {
        self.0.backend.abort_collectives();
        self.0.wait_for_device();
    }
}
