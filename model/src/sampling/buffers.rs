//! Device memory for a step's sampling requests, chosen tokens and reports. The memory outlives the
//! pass and keeps its address, so that a captured step reads the next requests from the same
//! address.

use bursar_kernels::{Backend, KernelError, Rank, Scope, Tensor, sampling::SampleLayout};

/// The results start after the requests, at a multiple of this many words: the size of
/// a GPU cache line.
const ALIGNMENT: usize = 32;

/// The sizes of sampling buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingShape {
    /// Maximum rows of logits in a step: one for each sequence, and one for each drafted token.
    pub rows: usize,
    /// Maximum tokens of a sequence, all of which penalties may read.
    pub context_tokens: usize,
    /// Number of columns of the logits.
    pub vocabulary: usize,
}

impl SamplingShape {
    /// The layout of the requests and the reports of `rows` rows.
    pub fn layout(&self, rows: usize) -> SampleLayout {
        SampleLayout { rows, vocabulary: self.vocabulary }
    }

    /// Total size in words: the largest requests, one token per row, and the largest report.
    pub fn words(&self) -> usize {
        self.question_words() + self.result_words()
    }

    fn question_words(&self) -> usize {
        self.layout(self.rows).words_max(self.context_tokens).next_multiple_of(ALIGNMENT)
    }

    fn result_words(&self) -> usize {
        self.rows + self.layout(self.rows).report_words()
    }
}

/// The requests, then one token per row, then the report, in one tensor. Tokens and
/// report are downloaded together.
pub struct SamplingBuffers<'a> {
    shape: SamplingShape,
    words: Tensor<'a>, // [words] u32
}

impl<'a> SamplingBuffers<'a> {
    /// Uses `words` `[words]` u32 as the buffers. The address of `words` must be a multiple of 8,
    /// and only passes that use these buffers may access it, one pass at a time.
    ///
    /// # Panics
    /// If `words` does not have [`SamplingShape::words`] words, which is a bug in the caller.
    pub fn over(words: Tensor<'a>, shape: SamplingShape) -> Self {
        assert_eq!(words.rows(), shape.words(), "sampling buffers of {shape:?}");
        SamplingBuffers { shape, words }
    }

    pub fn shape(&self) -> SamplingShape {
        self.shape
    }

    /// The tokens that the latest step chose, one per row of its logits: `[rows]` u32. If the step
    /// had fewer rows, the remaining entries are from earlier steps.
    pub fn chosen(&self) -> Tensor<'_> {
        self.results(0)
    }

    /// The tokens that the latest step chose, followed by the first `report_words`
    /// words of its report.
    pub fn results(&self, report_words: usize) -> Tensor<'_> {
        let first = self.shape.question_words();
        self.words.row_range(first..first + self.shape.rows + report_words)
    }

    /// Chooses the likeliest token of each row. `own` has this rank's logits `[rows, own tokens]`,
    /// as a step with [`LogitsOf::OwnRank`](crate::flow::LogitsOf::OwnRank) computes them.
    ///
    /// # Errors
    /// Same as [`argmax_of_ranks_into`](Scope::argmax_of_ranks_into).
    pub fn take_argmax<B: Backend>(&mut self, scope: &Scope<'_, B>, own: &Tensor<'_>) -> Result<(), KernelError> {
        let vocabulary = self.shape.vocabulary;
        let (_, mut results) = self.words.split_rows_mut(self.shape.question_words());
        argmax_into(scope, own, vocabulary, &mut results.row_range_mut(0..own.rows()))
    }

    /// Uploads the requests of the next step: a packed
    /// [`SampleBatch`](bursar_kernels::sampling::SampleBatch).
    ///
    /// # Errors
    /// [`KernelError`] if the upload fails.
    pub fn ask<B: Backend>(&mut self, scope: &Scope<'_, B>, words: &[u32]) -> Result<(), KernelError> {
        let (mut question, _) = self.words.split_rows_mut(self.shape.question_words());
        scope.upload_into(words, &mut question.row_range_mut(0..words.len()))
    }

    /// Chooses a token from each row of `logits` `[rows, vocabulary]` as the uploaded requests ask,
    /// and writes the report; see [`sample_into`](Scope::sample_into).
    ///
    /// # Errors
    /// Same as [`sample_into`](Scope::sample_into).
    pub fn choose<B: Backend>(&mut self, scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<(), KernelError> {
        let (question, mut results) = self.words.split_rows_mut(self.shape.question_words());
        let (mut chosen, mut report) = results.split_rows_mut(self.shape.rows);
        scope.sample_into(logits, &question, self.shape.layout(logits.rows()), &mut chosen, &mut report)
    }
}

/// Writes the likeliest token of each row to `out` `[rows]` u32. `own` has this rank's logits
/// `[rows, own tokens]` of `vocabulary` tokens, as a step or a draft head with
/// [`LogitsOf::OwnRank`](crate::flow::LogitsOf::OwnRank) computes them.
///
/// # Errors
/// Same as [`argmax_of_ranks_into`](Scope::argmax_of_ranks_into).
pub fn argmax_into<B: Backend>(
    scope: &Scope<'_, B>,
    own: &Tensor<'_>,
    vocabulary: usize,
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    let rank = if scope.chooses_among_ranks() { scope.rank() } else { Rank::ALONE };
    scope.argmax_of_ranks_into(own, rank.share_rounded_up(vocabulary), out)
}
