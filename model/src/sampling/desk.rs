//! The desk: memory in which a step's choices are asked for, made and reported. It outlives the pass, and lies still, so
//! that a captured step finds there what the next one asks.

use bursar_budgets::Address;
use bursar_kernels::{Backend, DType, KernelError, Scope, Tensor, sampling::SampleLayout};

/// What parts of a desk start at a multiple of: a line of a GPU's cache, in words.
const ALIGNMENT: usize = 32;

/// How large a desk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeskShape {
    /// Sequences in a step at most.
    pub sequences: usize,
    /// Tokens of a sequence at most: what penalties read.
    pub context_tokens: usize,
    /// Tokens of a row of logits.
    pub vocabulary: usize,
}

impl DeskShape {
    /// What is asked of, and reported of, `rows` rows.
    pub fn layout(&self, rows: usize) -> SampleLayout {
        SampleLayout { rows, vocabulary: self.vocabulary }
    }

    /// Words of a whole desk: the largest question, a token a sequence, the largest report.
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

/// A desk.
pub struct Desk<'a> {
    shape: DeskShape,
    question: Tensor<'a>, // [words] u32
    /// A token a sequence, then the report, so that both come to the host as one.
    results: Tensor<'a>, // [words] u32
}

impl<'a> Desk<'a> {
    /// At `address`, which is a multiple of 8.
    ///
    /// # Safety
    /// For as long as the desk lives, the [words](DeskShape::words) from `address` on are backed device memory that nothing
    /// but passes over this desk touches, one pass after the other.
    pub unsafe fn at(address: Address, shape: DeskShape) -> Self {
        let words = shape.question_words();
        // SAFETY: by the caller's word.
        let (question, results) = unsafe {
            let behind = address.offset(DType::U32.bytes(words));
            (
                Tensor::persistent(address, [words], DType::U32),
                Tensor::persistent(behind, [shape.result_words()], DType::U32),
            )
        };
        Desk { shape, question, results }
    }

    /// How large it is.
    pub fn shape(&self) -> DeskShape {
        self.shape
    }

    /// What the newest step has chosen: `[sequences]` u32, a row for each of its rows of logits.
    pub fn chosen(&self) -> Tensor<'_> {
        self.results.row_range(0..self.shape.sequences)
    }

    /// What the newest step has chosen, and the first `report_words` words of its report, as one.
    pub fn results(&self, report_words: usize) -> Tensor<'_> {
        self.results.row_range(0..self.shape.sequences + report_words)
    }

    /// Takes the likeliest token of each row of `logits` `[rows, vocabulary]`.
    ///
    /// # Errors
    /// As [`argmax_into`](Scope::argmax_into).
    pub fn take_likeliest<B: Backend>(&mut self, scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<(), KernelError> {
        scope.argmax_into(logits, &mut self.results.row_range_mut(0..logits.rows()))
    }

    /// Lays down what the next choice asks: a packed [`SampleBatch`](bursar_kernels::sampling::SampleBatch).
    ///
    /// # Errors
    /// What the device says. More words than there is room for are our own bug.
    pub fn ask<B: Backend>(&mut self, scope: &Scope<'_, B>, words: &[u32]) -> Result<(), KernelError> {
        scope.upload_into(words, &mut self.question.row_range_mut(0..words.len()))
    }

    /// Chooses from each row of `logits` `[rows, vocabulary]` as it was asked, and reports; see
    /// [`sample_into`](Scope::sample_into).
    ///
    /// # Errors
    /// As the operation.
    pub fn choose<B: Backend>(&mut self, scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<(), KernelError> {
        let (mut chosen, mut report) = self.results.split_rows_mut(self.shape.sequences);
        scope.sample_into(logits, &self.question, self.shape.layout(logits.rows()), &mut chosen, &mut report)
    }
}
