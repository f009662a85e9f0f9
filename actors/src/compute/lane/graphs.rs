//! The captured graphs of a lane, two a bucket, and the steps that they run, or would if they were there.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use bursar_budgets::Bytes;
use bursar_kernels::{Backend, Graph, KernelError, KvLayer, Scope, Tensor, WorkCounter, ops::transfer};
use bursar_model::{
    blocks::decoder::StepCaches,
    flow::{StepBatch, StepLayout},
    sampling::SamplingBuffers,
};

use super::{
    ModelRunner,
    choosing::TokenChoice,
    job::{LaneError, StepJob},
    pending::Launched,
};

/// What a lane has captured. It goes before the memory that it names.
#[derive(Default)]
pub(super) struct Graphs {
    by_rows: RefCell<BTreeMap<usize, Captured>>,
    /// The inputs of a step, on their way: a step of hundreds of long sequences has half a megabyte of them.
    words: Cell<Vec<u32>>,
}

/// Decoding of so many rows. The ways in which tokens are chosen have a graph each: to take the likeliest reads the
/// logits once, and no parameters.
struct Captured {
    likeliest: Box<dyn Graph>,
    asked: Box<dyn Graph>,
}

impl Graphs {
    /// Lets go of what was captured for so many rows.
    pub(super) fn forget(&self, rows: usize) {
        self.by_rows.borrow_mut().remove(&rows);
    }
}

impl Captured {
    fn of(&self, tokens: Tokens) -> &dyn Graph {
        match tokens {
            Tokens::Likeliest => &*self.likeliest,
            Tokens::Asked => &*self.asked,
        }
    }
}

/// Which tokens a pass leaves in the sampling buffers.
#[derive(Clone, Copy)]
enum Tokens {
    Likeliest,
    /// What the sampling buffers ask for when the pass is run.
    Asked,
}

impl<B: Backend> ModelRunner<B> {
    /// Captures decoding of `rows` rows, in place of what was captured for as many before. Gives what its graphs take of
    /// the device's memory; none where there are no graphs. Nothing that a step reads or leaves is touched, so that it may
    /// come between any two.
    pub(super) fn capture(&self, rows: usize) -> Result<Option<Bytes>, LaneError> {
        let Some(inputs) = &self.memory.graphs else { return Ok(None) };
        let layout = inputs.shape().layout(rows);
        let layers = self.memory.kv.layers_reserved();
        // The old one's memory is what the new one's lease pays for.
        self.graphs.forget(rows);
        self.upload_inputs(&layout, &StepBatch::default())?;
        // Products choose their algorithms, which takes measuring, and that cannot be captured.
        let mut buffers = self.memory.sampling.buffers();
        self.autotune(|| Ok(self.decode(&layout, &layers, &mut buffers, None)?))?;
        let mut capture =
            |tokens| self.backend.capture(&mut || self.decode(&layout, &layers, &mut buffers, Some(tokens)));
        let Some(likeliest) = capture(Tokens::Likeliest)? else { return Ok(None) };
        let Some(asked) = capture(Tokens::Asked)? else { return Ok(None) };
        let bytes = likeliest.bytes() + asked.bytes();
        self.graphs.by_rows.borrow_mut().insert(rows, Captured { likeliest, asked });
        Ok(Some(bytes))
    }

    /// Runs a step that decodes alone in the smallest size that holds it: an upload, another if its rows ask for more than
    /// the likeliest tokens, one replay, and the tokens on their way back. Where that size is not captured, what the graph
    /// would replay is launched: how sums are split depends on the size, and so would tokens on what is captured. None for
    /// any other step, and where there are no graphs.
    pub(super) fn decode_alone(&self, job: &StepJob) -> Option<Result<Launched, LaneError>> {
        let inputs = self.memory.graphs.as_ref()?;
        if !job.batch.is_decoding_alone() {
            return None;
        }
        let layout = inputs.shape().layout_holding(job.batch.token_count())?;
        layout.takes(&job.batch).then(|| self.decode_in(&layout, job))
    }

    fn decode_in(&self, layout: &StepLayout, job: &StepJob) -> Result<Launched, LaneError> {
        self.upload_inputs(layout, &job.batch)?;
        let graphs = self.graphs.by_rows.borrow();
        let captured = graphs.get(&layout.tokens);
        // A graph's temporaries lie from the workspace's start on, as they did when it was captured.
        assert!(self.workspace.used().is_zero(), "a graph is replayed in an empty workspace");
        let choosing = self.pass(|scope, _| {
            let mut buffers = self.memory.sampling.buffers();
            let wanted = TokenChoice::of(&job.choices, buffers.shape().vocabulary);
            let tokens = match &wanted {
                TokenChoice::Likeliest { .. } => Tokens::Likeliest,
                TokenChoice::Asked(asked) => {
                    self.ask(scope, &mut buffers, &asked.batch, layout.logit_rows)?;
                    Tokens::Asked
                }
            };
            match captured {
                Some(captured) => captured.of(tokens).replay()?,
                None => self.decode(layout, &self.memory.kv.layers(), &mut buffers, Some(tokens))?,
            }
            Ok(wanted.download(scope, &buffers, layout.logit_rows)?)
        })?;
        Ok(Launched { choosing, scores: None, is_by_graph: captured.is_some() })
    }

    fn upload_inputs(&self, layout: &StepLayout, batch: &StepBatch) -> Result<(), KernelError> {
        let inputs = self.memory.graphs.as_ref().expect("whoever has graphs has inputs for them");
        let mut words = self.graphs.words.take();
        layout.pack(batch, &mut words);
        let mut image = inputs.tensor(layout);
        let uploaded = transfer::fill_elements(&self.backend, &words, &mut image.row_range_mut(0..words.len()));
        self.graphs.words.set(words);
        uploaded
    }

    /// Launches the decoding of one token for each row of `layout`, from the empty workspace's start on. Without `tokens`
    /// the sampling buffers stay as they are: a step that is under way may still want the tokens in them.
    fn decode(
        &self,
        layout: &StepLayout,
        layers: &[KvLayer],
        buffers: &mut SamplingBuffers<'_>,
        tokens: Option<Tokens>,
    ) -> Result<(), KernelError> {
        assert!(self.workspace.used().is_zero(), "decoding is captured, and launched, in an empty workspace");
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.backend, &self.workspace, &counter);
        let inputs = self.memory.graphs.as_ref().expect("as above");
        let caches = StepCaches { layers, pictures: None, previous: &buffers.chosen() };
        let logits: Tensor<'_> = self.model.step_over(&scope, &inputs.tensor(layout), layout, &caches)?;
        match tokens {
            Some(Tokens::Likeliest) => buffers.take_likeliest(&scope, &logits),
            Some(Tokens::Asked) => buffers.choose(&scope, &logits),
            None => scope.argmax(&logits).map(drop),
        }
    }
}
