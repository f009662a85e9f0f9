//! Memory in which a step's choices are asked for, made and reported. It outlives the pass, and lies still, so
//! that a captured step finds there what the next one asks.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, sampling::SampleLayout};

/// What each part of the buffers starts at a multiple of: a line of a GPU's cache, in words.
const ALIGNMENT: usize = 32;

/// How large sampling buffers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingShape {
    /// Sequences in a step at most.
    pub sequences: usize,
    /// Tokens of a sequence at most: what penalties read.
    pub context_tokens: usize,
    /// Tokens of a row of logits.
    pub vocabulary: usize,
}

impl SamplingShape {
    /// What is asked of, and reported of, `rows` rows.
    pub fn layout(&self, rows: usize) -> SampleLayout {
        SampleLayout { rows, vocabulary: self.vocabulary }
    }

    /// Words of all of them: the largest question, a token a sequence, the largest report.
    pub fn words(&self) -> usize {
        self.question_words() + self.result_words()
    }

    fn question_words(&self) -> usize {
        self.layout(self.sequences).words_max(self.context_tokens).next_multiple_of(ALIGNMENT)
    }

    fn result_words(&self) -> usize {
        self.sequences + self.layout(self.sequences).report_words()
    }
}

/// What is asked, then a token a sequence, then the report; the last two come to the host as one.
pub struct SamplingBuffers<'a> {
    shape: SamplingShape,
    words: Tensor<'a>, // [words] u32
}

impl<'a> SamplingBuffers<'a> {
    /// In `words` `[words]` u32, whose address is a multiple of 8, and which nothing but passes over these buffers
    /// touches, one pass after the other. Another number of words is our own bug.
    pub fn over(words: Tensor<'a>, shape: SamplingShape) -> Self {
        assert_eq!(words.rows(), shape.words(), "sampling buffers of {shape:?}");
        SamplingBuffers { shape, words }
    }

    /// How large it is.
    pub fn shape(&self) -> SamplingShape {
        self.shape
    }

    /// What the newest step has chosen: `[sequences]` u32, a row for each of its rows of logits.
    pub fn chosen(&self) -> Tensor<'_> {
        self.results(0)
    }

    /// What the newest step has chosen, and the first `report_words` words of its report, as one.
    pub fn results(&self, report_words: usize) -> Tensor<'_> {
        let first = self.shape.question_words();
        self.words.row_range(first..first + self.shape.sequences + report_words)
    }

    /// Takes the likeliest token of each row of `logits` `[rows, vocabulary]`.
    ///
    /// # Errors
    /// As [`argmax_into`](Scope::argmax_into).
    pub fn take_likeliest<B: Backend>(&mut self, scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<(), KernelError> {
        let (_, mut results) = self.words.split_rows_mut(self.shape.question_words());
        scope.argmax_into(logits, &mut results.row_range_mut(0..logits.rows()))
    }

    /// Lays down what the next choice asks: a packed [`SampleBatch`](bursar_kernels::sampling::SampleBatch).
    ///
    /// # Errors
    /// What the device says. More words than there is room for are our own bug.
    pub fn ask<B: Backend>(&mut self, scope: &Scope<'_, B>, words: &[u32]) -> Result<(), KernelError> {
        let (mut question, _) = self.words.split_rows_mut(self.shape.question_words());
        scope.upload_into(words, &mut question.row_range_mut(0..words.len()))
    }

    /// Chooses from each row of `logits` `[rows, vocabulary]` as it was asked, and reports; see
    /// [`sample_into`](Scope::sample_into).
    ///
    /// # Errors
    /// As the operation.
    pub fn choose<B: Backend>(&mut self, scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<(), KernelError> {
        let (question, mut results) = self.words.split_rows_mut(self.shape.question_words());
        let (mut chosen, mut report) = results.split_rows_mut(self.shape.sequences);
        scope.sample_into(logits, &question, self.shape.layout(logits.rows()), &mut chosen, &mut report)
    }
}
