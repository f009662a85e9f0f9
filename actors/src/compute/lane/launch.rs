//! Launches of jobs: the work of each job, up to the point where the lane waits for the device.

use std::time::Instant;

use bursar_kernels::{Backend, FaultyBackend, Scope, Tensor, WorkCounter};
use bursar_model::{
    Depth,
    blocks::decoder::StepCaches,
    sampling::{Scored, Scores},
    worst_cases::{self, Footprint, Pass},
};

use super::{
    ModelRunner,
    choosing::{Choosing, TokenChoice, logits_of},
    job::{Job, LaneError, StepJob},
    pending::{Pending, RunningStep},
};
use crate::{compute::expert_loads::PendingLoads, supervise::InjectedFault};

impl<B: Backend> ModelRunner<B> {
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
            Job::Copy(_) => unreachable!("copies are begun on a path separate from other jobs"),
            Job::Stress(job) => {
                let outcome = self.unless_refused(|| self.stress(&job.worst_case.pass, job.depth));
                Pending::Stress(job, outcome)
            }
            Job::Capture(job) => {
                let outcome = self.unless_refused(|| self.capture(job.size));
                Pending::Capture(job, outcome)
            }
            Job::Forget { size, answer } => {
                self.graphs.forget(size);
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

    fn step(&self, job: &StepJob) -> Result<RunningStep, LaneError> {
        if let Some(launched) = self.decode_alone(job) {
            return launched;
        }
        self.pass(|scope, cache| {
            let (tokens, logit_rows) = (job.batch.token_count(), job.batch.logit_rows.len());
            let mut memory = self.draft_memory(scope, job.batch.drafts.is_some(), tokens, logit_rows)?;
            let hidden = memory.as_mut().map(|memory| &mut memory.hidden);
            let (choosing, scores) = self.choose(&scope.scope(), job, cache, hidden)?;
            if let Some(memory) = &mut memory {
                self.draft(scope, &job.batch, cache, memory)?;
            }
            let (choosing, drafting) = self.drafts(scope, job, memory, choosing)?;
            Ok(RunningStep { choosing, drafting, scores, is_by_graph: false, loads: None })
        })
    }

    /// Launches the decoder for a step, then the kernels that choose its tokens, and starts the
    /// download of the tokens. If `hidden` `[draft rows, draft width]` is given, it receives the
    /// rows that a draft head reads.
    fn choose(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        job: &StepJob,
        cache: &Tensor<'_>,
        hidden: Option<&mut Tensor<'_>>,
    ) -> Result<(Choosing, Option<Scored>), LaneError> {
        let layers = self.memory.layer_caches(&self.model);
        let mut buffers = self.memory.sampling.buffers(self.rank());
        let caches = StepCaches { layers: &layers, pictures: Some(cache), previous: &buffers.chosen() };
        let mut scores = Scores::begin(scope, &job.scores, buffers.shape().vocabulary)?;
        let of = logits_of(&job.choices);
        let score = |scope: &Scope<'_, _>, rows: &Tensor<'_>| scores.score(scope, rows);
        // [logit_rows, vocabulary or own tokens]
        let logits = self.model.step(scope, &job.batch, &caches, of, hidden, score)?;
        let scores = scores.download(scope)?;
        let rows = logits.rows();
        // The choices are built after the layers are launched, so that the device computes
        // while the host builds masks.
        let choices = TokenChoice::of(&job.choices, buffers.shape().vocabulary);
        match &choices {
            TokenChoice::Greedy { .. } => buffers.take_argmax(scope, &logits)?,
            TokenChoice::Asked(asked) => {
                self.ask(scope, &mut buffers, &asked.batch, rows)?;
                buffers.choose(scope, &logits)?;
            }
        }
        Ok((choices.download(scope, &buffers, rows)?, scores))
    }

    /// Starts the download of how often each expert was chosen, if a read is due.
    fn look_at_experts(&self) -> Result<Option<PendingLoads>, LaneError> {
        let (Some(loads), Some(counters)) = (&self.loads, self.model.expert_loads()) else { return Ok(None) };
        if !loads.borrow_mut().is_due(Instant::now()) {
            return Ok(None);
        }
        self.pass(|scope, _| Ok(Some(scope.download_later(counters)?)))
    }

    fn stress(&self, pass: &Pass, depth: Depth) -> Result<Footprint, LaneError> {
        self.autotune(|| self.stress_autotuned(pass, depth))
    }

    fn stress_autotuned(&self, pass: &Pass, depth: Depth) -> Result<Footprint, LaneError> {
        self.workspace.reset_high_water();
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        let layers = self.memory.layer_caches(&self.model);
        let mut buffers = self.memory.sampling.buffers(self.rank());
        self.with_cache(|cache| Ok(worst_cases::run(&self.model, &scope, pass, depth, &layers, cache, &mut buffers)?))?;
        Ok(Footprint { workspace: self.workspace.high_water(), work: counter.total() })
    }
}
