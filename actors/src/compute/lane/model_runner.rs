//! The model runner of a lane: a backend, a workspace, the model and the caches.

use std::{
    cell::{Cell, RefCell},
    mem,
    sync::Arc,
    time::Instant,
};

use bursar_budgets::{DeviceError, Segment, Workspace};
use bursar_kernels::{Backend, FaultyBackend, KernelError, Rank, Scope, Tensor, WorkCounter, sampling::SampleBatch};
use bursar_model::{Model, sampling::SamplingBuffers};
use tracing::warn;

use super::{graphs::Graphs, job::LaneError};
use crate::compute::{expert_loads::ExpertLoads, memory::EngineMemory};

/// Runs the jobs of a lane. The lane's thread owns the runner.
pub struct ModelRunner<B> {
    /// This field is dropped first, because the graphs use all fields below.
    pub(super) graphs: Graphs,
    pub(super) backend: FaultyBackend<B>,
    pub(super) workspace: Workspace,
    pub(super) model: Arc<Model>,
    pub(super) memory: Arc<EngineMemory>,
    /// Reused buffer for sampling parameters during upload. The past tokens of hundreds
    /// of sequences take megabytes.
    pub(super) question: Cell<Vec<u32>>,
    /// Whether the next job fails as if the device had refused memory.
    pub(super) refuses: Cell<bool>,
    is_desynchronized: Cell<bool>,
    /// Whether this lane gets copy jobs.
    pub(super) copies: bool,
    /// `None` for a model without experts.
    pub(super) loads: Option<RefCell<ExpertLoads>>,
}

impl<B: Backend> ModelRunner<B> {
    /// Creates a runner that computes with `backend` in `workspace`, which must belong to `memory`.
    pub fn new(backend: B, workspace: Arc<Segment>, model: Arc<Model>, memory: Arc<EngineMemory>) -> Self {
        let copies = memory.copies_in(&workspace);
        let workspace = Workspace::of_rank(workspace, model.rank().index());
        let (question, refuses, is_desynchronized) = (Cell::default(), Cell::default(), Cell::default());
        let backend = FaultyBackend::over(backend);
        let loads = model.expert_loads().map(|loads| ExpertLoads::new(loads.columns(), Instant::now()).into());
        let graphs = Graphs::default();
        ModelRunner { graphs, backend, workspace, model, memory, question, refuses, is_desynchronized, copies, loads }
    }

    pub(super) fn rank(&self) -> Rank {
        self.model.rank()
    }

    /// Waits until the device has completed all work that this runner launched. Returns at once if
    /// the device is lost.
    pub(super) fn wait_for_device(&self) {
        drop(self.backend.wait_for_all());
    }

    /// Returns the outcome of a job. If the job failed, this method waits for the device first,
    /// because it is unknown which work of the job is still running. If the ranks are
    /// desynchronized although no device is lost, this lane stops, because it cannot continue. A
    /// new lane can replace it.
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
            self.is_desynchronized.set(true);
            LaneError::Gone
        })
    }

    /// Returns `true` if this rank has lost its synchronization with the other ranks and can no
    /// longer take part in collectives.
    pub(super) fn is_desynchronized(&self) -> bool {
        self.is_desynchronized.get()
    }

    /// Runs `run`, unless an injected fault refuses memory to it. If `run` fails on one of several
    /// linked ranks, the other ranks may be at any point of the same work. The failed rank then
    /// stops, and aborts the collectives so that the other ranks stop too.
    pub(super) fn unless_refused<T>(&self, run: impl FnOnce() -> Result<T, LaneError>) -> Result<T, LaneError> {
        let outcome = if self.refuses.take() { self.refused() } else { self.wait_on_panic(run) };
        if outcome.is_err() && self.backend.rank().of() > 1 {
            self.backend.abort_collectives();
            self.is_desynchronized.set(true);
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

    /// Runs `run`. If it panics, this method waits for the device before the job is dropped,
    /// because launched work still uses memory that the job holds.
    fn wait_on_panic<T>(&self, run: impl FnOnce() -> T) -> T {
        let past = WaitOnDrop(self);
        let given = run();
        mem::forget(past);
        given
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

    pub(super) fn pass<T>(
        &self,
        run: impl FnOnce(&Scope<'_, FaultyBackend<B>>, &mut Tensor<'_>) -> Result<T, LaneError>,
    ) -> Result<T, LaneError> {
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        self.with_cache(|cache| run(&scope, cache))
    }

    pub(super) fn with_cache<T>(
        &self,
        run: impl FnOnce(&mut Tensor<'_>) -> Result<T, LaneError>,
    ) -> Result<T, LaneError> {
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

struct WaitOnDrop<'b, B: Backend>(&'b ModelRunner<B>);

impl<B: Backend> Drop for WaitOnDrop<'_, B> {
    fn drop(&mut self) {
        self.0.backend.abort_collectives();
        self.0.wait_for_device();
    }
}
