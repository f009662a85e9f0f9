//! Decode steps: their capture as graphs, and steps that replay a graph or launch the same work.

use bursar_budgets::Bytes;
use bursar_kernels::{Backend, KernelError, Scope, Tensor, WorkCounter, ops::transfer};
use bursar_model::{
    blocks::{decoder::StepCaches, layer_cache::LayerCache},
    flow::{LogitsOf, StepBatch, StepLayout},
    sampling::SamplingBuffers,
};

use super::{
    ModelRunner,
    choosing::{Chosen, TokenChoice},
    graphs::{Captured, Tokens},
    job::{LaneError, StepJob},
    pending::RunningStep,
};

impl<B: Backend> ModelRunner<B> {
    /// Captures decode steps of `rows` rows, replacing earlier graphs of that size. Returns the
    /// device memory that the graphs take, or `None` on a device without graphs. Capturing changes
    /// no input or result of a step, so it may run between any two steps.
    pub(super) fn capture(&self, rows: usize) -> Result<Option<Bytes>, LaneError> {
        let Some(inputs) = &self.memory.graphs else { return Ok(None) };
        let layout = inputs.shape().layout(rows);
        let layers = self.memory.layer_caches_reserved(&self.model);
        // The lease pays for only one set of graphs, so the old graphs are dropped first.
        self.graphs.forget(rows);
        self.upload_inputs(&layout, &StepBatch::default())?;
        // GEMM autotuning runs first, because its measurements cannot be captured.
        let mut buffers = self.memory.sampling.buffers(self.rank());
        self.autotune(|| Ok(self.decode(&layout, &layers, &mut buffers, None)?))?;
        let mut capture =
            |tokens| self.backend.capture(&mut || self.decode(&layout, &layers, &mut buffers, Some(tokens)));
        let Some(greedy) = capture(Tokens::Greedy)? else { return Ok(None) };
        let Some(asked) = capture(Tokens::Asked)? else { return Ok(None) };
        let bytes = greedy.bytes() + asked.bytes();
        self.graphs.by_rows.borrow_mut().insert(rows, Captured { greedy, asked });
        Ok(Some(bytes))
    }

    /// Runs a step that contains only decoding sequences, in the smallest size that holds it. Such
    /// a step consists of an upload of the inputs, an upload of sampling parameters if a row needs
    /// more than its likeliest token, one replay, and a download of the tokens. If that size is not
    /// captured, the same work is launched in the same size: the size determines how sums are
    /// split, and tokens must not depend on which sizes are captured. Returns `None` for any other
    /// step, and on a device without graphs.
    pub(super) fn decode_alone(&self, job: &StepJob) -> Option<Result<RunningStep, LaneError>> {
        let inputs = self.memory.graphs.as_ref()?;
        if !job.batch.is_decoding_alone() || job.batch.drafts.is_some() {
            return None;
        }
        let layout = inputs.shape().layout_holding(job.batch.token_count())?;
        layout.takes(&job.batch).then(|| self.decode_in(&layout, job))
    }

    fn decode_in(&self, layout: &StepLayout, job: &StepJob) -> Result<RunningStep, LaneError> {
        self.upload_inputs(layout, &job.batch)?;
        let graphs = self.graphs.by_rows.borrow();
        let captured = graphs.get(&layout.tokens);
        // A graph's temporaries start at the beginning of the workspace, as they did at capture.
        assert!(self.workspace.used().is_zero(), "a graph is replayed in an empty workspace");
        let choosing = self.pass(|scope, _| {
            let mut buffers = self.memory.sampling.buffers(self.rank());
            let wanted = TokenChoice::of(&job.choices, buffers.shape().vocabulary);
            let tokens = match &wanted {
                TokenChoice::Greedy { .. } => Tokens::Greedy,
                TokenChoice::Asked(asked) => {
                    self.ask(scope, &mut buffers, &asked.batch, layout.logit_rows)?;
                    Tokens::Asked
                }
            };
            match captured {
                Some(captured) => captured.of(tokens).replay()?,
                None => self.decode(layout, &self.memory.layer_caches(&self.model), &mut buffers, Some(tokens))?,
            }
            Ok(wanted.download(scope, &buffers, layout.logit_rows)?)
        })?;
        let choosing = Chosen::Coming(choosing);
        Ok(RunningStep { choosing, drafting: None, scores: None, is_by_graph: captured.is_some(), loads: None })
    }

    fn upload_inputs(&self, layout: &StepLayout, batch: &StepBatch) -> Result<(), KernelError> {
        let inputs = self.memory.graphs.as_ref().expect("a lane with graphs has inputs for them");
        let mut words = self.graphs.words.take();
        layout.pack(batch, &mut words);
        let mut step_arrays = inputs.tensor(layout, self.rank());
        let uploaded = transfer::fill_elements(&self.backend, &words, &mut step_arrays.row_range_mut(0..words.len()));
        self.graphs.words.set(words);
        uploaded
    }

    /// Launches the decoding of one token for each row of `layout`. Temporaries start at the
    /// beginning of the empty workspace. Without `tokens` the sampling buffers are not written,
    /// because a running step may still need the tokens in them.
    fn decode(
        &self,
        layout: &StepLayout,
        layers: &[LayerCache],
        buffers: &mut SamplingBuffers<'_>,
        tokens: Option<Tokens>,
    ) -> Result<(), KernelError> {
        assert!(self.workspace.used().is_zero(), "decoding is captured, and launched, in an empty workspace");
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        let inputs = self.memory.graphs.as_ref().expect("a lane that captured a graph has its input memory");
        let caches = StepCaches { layers, pictures: None, previous: &buffers.chosen() };
        let of = tokens.map_or(LogitsOf::AllRanks, Tokens::logits_of);
        let step_arrays = inputs.tensor(layout, self.rank());
        let logits: Tensor<'_> = self.model.step_over(&scope, &step_arrays, layout, &caches, of, None)?;
        match tokens {
            Some(Tokens::Greedy) => buffers.take_argmax(&scope, &logits),
            Some(Tokens::Asked) => buffers.choose(&scope, &logits),
            None => scope.argmax(&logits).map(drop),
        }
    }
}
