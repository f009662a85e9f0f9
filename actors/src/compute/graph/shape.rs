//! What captured steps are made of: sizes, and where their inputs lie. Pure.

use bursar_budgets::Bytes;
use bursar_kernels::DType;
use bursar_model::flow::StepLayout;

use super::core::{bucket, buckets};

/// What the layouts of captured steps follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Sequences in the largest step.
    pub sequences: usize,
    /// Tokens of a sequence at most.
    pub context_tokens: usize,
    /// Axes of a position that the model has.
    pub axes: usize,
}

impl GraphShape {
    /// Where the arrays of a captured step of `rows` rows lie.
    pub fn layout(&self, rows: usize) -> StepLayout {
        StepLayout::decode(rows, self.axes, self.context_tokens)
    }

    /// Bytes, in whole pages, of the inputs of the largest step.
    pub fn bytes(&self, page: Bytes) -> Bytes {
        DType::U32.bytes(self.layout(self.sequences).words()).round_up(page)
    }

    /// Where the arrays of a step of `rows` decoding sequences lie: as in the smallest size that holds it. None if no size
    /// does.
    pub fn layout_holding(&self, rows: usize) -> Option<StepLayout> {
        bucket(rows, self.sequences).map(|rows| self.layout(rows))
    }

    /// The sizes that steps are captured in.
    pub fn buckets(&self) -> Vec<usize> {
        buckets(self.sequences)
    }
}
