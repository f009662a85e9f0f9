//! Where a lane works: a backend, a workspace, the model and the caches.

use std::{cell::RefCell, sync::Arc};

use bursar_budgets::{Segment, Workspace};
use bursar_kernels::{Backend, Scope, Tally, Tensor, ops::argmax::NO_CHOICE};
use bursar_model::{
    Model,
    blocks::decoder::StepCaches,
    corners::{self, Footprint, Pass},
    sampling::SamplerScratch,
};

use super::job::{Choice, Job, LaneError, StepJob};
use crate::{memory::EngineMemory, supervise::Drilled};

/// A lane's working place. It belongs to the lane's thread.
pub struct Bench<B> {
    backend: B,
    workspace: Workspace,
    model: Arc<Model>,
    memory: Arc<EngineMemory>,
    scratch: RefCell<SamplerScratch>,
}

impl<B: Backend> Bench<B> {
    /// A place that computes with `backend` in `workspace`, which must be of `memory`.
    pub fn new(backend: B, workspace: Arc<Segment>, model: Arc<Model>, memory: Arc<EngineMemory>) -> Self {
        Bench { backend, workspace: Workspace::over(workspace), model, memory, scratch: RefCell::default() }
    }

    /// Does a job; gives the call that answers it, to be made when the work counts as finished.
    pub(super) fn run(&self, job: Job) -> Box<dyn FnOnce()> {
        match job {
            Job::Step(job) => {
                let outcome = self.step(&job);
                Box::new(move || job.answer.give(outcome))
            }
            Job::Encode(job) => {
                let outcome = self.pass(|scope, cache| Ok(self.model.encode(scope, &job.batch, cache)?));
                Box::new(move || job.answer.give(outcome))
            }
            Job::Stress(job) => {
                let outcome = self.stress(&job.corner.pass);
                Box::new(move || job.answer.give(outcome))
            }
            Job::Wake => Box::new(|| {}),
            Job::Drill => panic!("{Drilled}"),
        }
    }

    fn step(&self, job: &StepJob) -> Result<Vec<u32>, LaneError> {
        self.pass(|scope, cache| {
            let layers = self.memory.kv.layers();
            let caches = StepCaches { layers: &layers, pictures: Some(cache) };
            let logits = self.model.step(scope, &job.batch, &caches)?; // [logit_rows, vocabulary]
            if job.choices.iter().all(Choice::is_largest_logit) {
                let chosen = scope.argmax(&logits)?;
                return Ok(scope.download(&chosen)?);
            }
            let rows = scope.download::<f32>(&logits)?;
            let mut scratch = self.scratch.borrow_mut();
            let choices = rows.chunks_exact(logits.columns()).zip(&job.choices);
            let pick = |(row, choice): (&[f32], &Choice)| {
                let history = choice.history.as_deref().unwrap_or_default();
                let chosen = choice.sampler.sample(row, history, choice.position, &mut scratch);
                // One row without a choice is its own sequence's misfortune.
                chosen.map_or(NO_CHOICE, |token| token.id)
            };
            Ok(choices.map(pick).collect())
        })
    }

    fn stress(&self, pass: &Pass) -> Result<Footprint, LaneError> {
        self.workspace.reset_high_water();
        let tally = Tally::default();
        let scope = Scope::new(&self.backend, &self.workspace, &tally);
        let layers = self.memory.kv.layers();
        self.with_cache(|cache| Ok(corners::run(&self.model, &scope, pass, &layers, cache)?))?;
        Ok(Footprint { workspace: self.workspace.high_water(), work: tally.total() })
    }

    fn pass<T>(
        &self,
        run: impl FnOnce(&Scope<'_, B>, &mut Tensor<'_>) -> Result<T, LaneError>,
    ) -> Result<T, LaneError> {
        let tally = Tally::default();
        let scope = Scope::new(&self.backend, &self.workspace, &tally);
        self.with_cache(|cache| run(&scope, cache))
    }

    fn with_cache<T>(&self, run: impl FnOnce(&mut Tensor<'_>) -> Result<T, LaneError>) -> Result<T, LaneError> {
        match &self.memory.vision_cache {
            Some(cache) => run(&mut cache.tensor()),
            None => {
                let activation = self.backend.target().activation();
                // SAFETY: a tensor without rows has no element that could be touched.
                let mut none = unsafe { Tensor::persistent(self.workspace.address(), [0, 1], activation) };
                run(&mut none)
            }
        }
    }
}
