//! Decode steps: their capture as graphs, and steps that replay a graph or launch the same work.

use bursar_budgets::Bytes;
use bursar_kernels::{Backend, FaultyBackend, KernelError, Scope, WorkCounter, ops::transfer};
use bursar_model::{
    blocks::{decoder::StepCaches, draft_head::DraftMemory, layer_cache::LayerCache},
    flow::{LogitsOf, StepBatch, StepLayout},
    sampling::SamplingBuffers,
};

use super::{
    ModelRunner,
    choosing::TokenChoice,
    graphs::{Captured, Tokens},
    job::{LaneError, StepJob},
    pending::RunningStep,
};
use crate::compute::graph::GraphKey;

impl<B: Backend> ModelRunner<B> {
    /// Captures decode steps of one size, replacing earlier graphs of that size. Returns the
    /// device memory that the graphs take, or `None` on a device without graphs. Capturing changes
    /// no input or result of a step, so it may run between any two steps.
    pub(super) fn capture(&self, size: GraphKey) -> Result<Option<Bytes>, LaneError> {
        let Some(inputs) = &self.memory.graphs else { return Ok(None) };
        let layout = inputs.shape().layout(size);
        let layers = self.memory.layer_caches_reserved(&self.model);
        // The lease pays for only one set of graphs, so the old graphs are dropped first.
        self.graphs.forget(size);
        self.upload_inputs(&layout, &StepBatch::default())?;
        // GEMM autotuning runs first, because its measurements cannot be captured.
        let mut buffers = self.memory.sampling.buffers(self.rank());
        self.autotune(|| Ok(self.decode_once(&layout, &layers, &mut buffers, None)?))?;
        let mut capture =
            |tokens| self.backend.capture(&mut || self.decode_once(&layout, &layers, &mut buffers, Some(tokens)));
        let Some(greedy) = capture(Tokens::Greedy)? else { return Ok(None) };
        let Some(asked) = capture(Tokens::Asked)? else { return Ok(None) };
        let bytes = greedy.bytes() + asked.bytes();
        self.graphs.by_size.borrow_mut().insert(size, Captured { greedy, asked });
        Ok(Some(bytes))
    }

    /// Runs a step that contains only decoding sequences, in the smallest size that holds it. Such
    /// a step consists of an upload of the inputs, an upload of sampling parameters if a row needs
    /// more than its likeliest token, one replay, and a download of the tokens. If that size is not
    /// captured, the same work is launched in the same size: the size determines how sums are
    /// split, and tokens must not depend on which sizes are captured. Returns `None` for any other
    /// step, for a step that no size holds, and on a device without graphs.
    pub(super) fn decode_alone(&self, job: &StepJob) -> Option<Result<RunningStep, LaneError>> {
        let shape = self.memory.graphs.as_ref()?.shape();
        let size = shape.size_for(&job.batch)?;
        Some(self.decode_in(size, &shape.layout(size), job))
    }

    fn decode_in(&self, size: GraphKey, layout: &StepLayout, job: &StepJob) -> Result<RunningStep, LaneError> {
        self.upload_inputs(layout, &job.batch)?;
        let graphs = self.graphs.by_size.borrow();
        let captured = graphs.get(&size);
        // A graph's temporaries start at the beginning of the workspace, as they did at capture.
        assert!(self.workspace.used().is_zero(), "a graph is replayed in an empty workspace");
        self.pass(|scope, _| {
            let mut memory = self.draft_memory(scope, layout.has_drafts, layout.tokens, layout.logit_rows)?;
            let mut buffers = self.memory.sampling.buffers(self.rank());
            let wanted = TokenChoice::of(&job.choices, buffers.shape().vocabulary);
            let tokens = match &wanted {
                TokenChoice::Greedy { .. } => Tokens::Greedy,
                TokenChoice::Asked(asked) => {
                    self.ask(scope, &mut buffers, &asked.batch, layout.logit_rows)?;
                    Tokens::Asked
                }
            };
            if let Some(captured) = captured {
                captured.of(tokens).replay()?;
            } else {
                let layers = self.memory.layer_caches(&self.model);
                self.decode(scope, layout, &layers, &mut buffers, Some(tokens), memory.as_mut())?;
            }
            let choosing = wanted.download(scope, &buffers, layout.logit_rows)?;
            let (choosing, drafting) = self.drafts(scope, job, memory, choosing)?;
            Ok(RunningStep { choosing, drafting, scores: None, is_by_graph: captured.is_some(), loads: None })
        })
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

    /// Launches a step of `layout` in the empty workspace, as a capture does.
    fn decode_once(
        &self,
        layout: &StepLayout,
        layers: &[LayerCache],
        buffers: &mut SamplingBuffers<'_>,
        tokens: Option<Tokens>,
    ) -> Result<(), KernelError> {
        assert!(self.workspace.used().is_zero(), "a step is captured in an empty workspace");
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        let mut memory = self.draft_memory(&scope, layout.has_drafts, layout.tokens, layout.logit_rows)?;
        self.decode(&scope, layout, layers, buffers, tokens, memory.as_mut())
    }

    /// Launches the decoder, samples a token for each row of logits of `layout` and, if `memory` is
    /// given, runs the draft head. Without `tokens` the sampling buffers are not written,
    /// because a running step may still need the tokens in them.
    fn decode(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        layout: &StepLayout,
        layers: &[LayerCache],
        buffers: &mut SamplingBuffers<'_>,
        tokens: Option<Tokens>,
        mut memory: Option<&mut DraftMemory<'_>>,
    ) -> Result<(), KernelError> {
        let inputs = self.memory.graphs.as_ref().expect("a lane that captured a graph has its input memory");
        let step_arrays = inputs.tensor(layout, self.rank());
        let of = tokens.map_or(LogitsOf::AllRanks, Tokens::logits_of);
        {
            let scope = scope.scope();
            let caches = StepCaches { layers, pictures: None, previous: &buffers.chosen() };
            let hidden = memory.as_mut().map(|memory| &mut memory.hidden);
            let logits = self.model.step_over(&scope, &step_arrays, layout, &caches, of, hidden)?;
            match tokens {
                Some(Tokens::Greedy) => buffers.take_argmax(&scope, &logits)?,
                Some(Tokens::Asked) => buffers.choose(&scope, &logits)?,
                None => scope.argmax(&logits).map(drop)?,
            }
        }
        let Some(memory) = memory else { return Ok(()) };
        let scope = scope.scope();
        let caches = StepCaches { layers, pictures: None, previous: &buffers.chosen() };
        let logits = self.model.draft_over(&scope, &step_arrays, layout, &caches, LogitsOf::OwnRank, memory.rows())?;
        logits.choose(&scope, &mut memory.drafted)
    }
}
