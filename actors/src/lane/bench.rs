//! Where a lane works: a backend, a workspace, the model and the caches.

use std::{cell::RefCell, sync::Arc};

use bursar_budgets::{Segment, Workspace};
use bursar_kernels::{Backend, KernelError, Scope, Tally, Tensor, ops::argmax::NO_CHOICE};
use bursar_model::{
    Model,
    blocks::decoder::StepCaches,
    corners::{self, Footprint, Pass},
    error::SamplingError,
    flow::Token,
    sampling::{SamplerScratch, log_probabilities},
};

use super::job::{Choice, Job, LaneError, StepJob, Stepped};
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

    fn step(&self, job: &StepJob) -> Result<Stepped, LaneError> {
        let mut scores = Vec::with_capacity(job.scores.len());
        let chosen = self.pass(|scope, cache| {
            let layers = self.memory.kv.layers();
            let caches = StepCaches { layers: &layers, pictures: Some(cache) };
            let mut wanted = job.scores.iter();
            // [logit_rows, vocabulary]
            let logits = self.model.step(scope, &job.batch, &caches, |scope, rows| {
                let logits = scope.download::<f32>(rows)?;
                let scored = logits.chunks_exact(rows.columns()).zip(wanted.by_ref());
                scores.extend(scored.map(|(row, score)| log_probabilities(row, score.token, score.top).ok()));
                Ok(())
            })?;
            self.choose(scope, &logits, &job.choices)
        })?;
        Ok(Stepped { chosen, scores })
    }

    fn choose(
        &self,
        scope: &Scope<'_, B>,
        logits: &Tensor<'_>, // [logit_rows, vocabulary]
        choices: &[Choice],
    ) -> Result<Vec<Result<Token, SamplingError>>, LaneError> {
        if choices.iter().all(|choice| choice.sampler.is_plain_argmax()) {
            let ids = scope.argmax(logits)?;
            let chosen = scope.download::<u32>(&ids)?.into_iter().zip(choices).map(|(id, choice)| match id {
                NO_CHOICE => Err(SamplingError::NotNumbers),
                id => Ok(Token { id, position: choice.position, log_probabilities: None }),
            });
            return Ok(chosen.collect());
        }
        let rows = scope.download::<f32>(logits)?;
        let mut scratch = self.scratch.borrow_mut();
        let choices = rows.chunks_exact(logits.columns()).zip(choices);
        Ok(choices.map(|(row, choice)| choice.sampler.sample(row, choice.past(), &mut scratch)).collect())
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
        let outcome = match &self.memory.vision_cache {
            Some(cache) => run(&mut cache.tensor()),
            None => {
                let activation = self.backend.target().activation();
                // SAFETY: a tensor without rows has no element that could be touched.
                let mut none = unsafe { Tensor::persistent(self.workspace.address(), [0, 1], activation) };
                run(&mut none)
            }
        };
        // What was computed on a device that was lost meanwhile is worth nothing.
        let device = self.workspace.segment().map(|segment| segment.device().check());
        device.unwrap_or(Ok(())).map_err(KernelError::Device)?;
        outcome
    }
}
