//! The sizes of captured steps, and the layout of their inputs: pure.

use bursar_budgets::Bytes;
use bursar_kernels::DType;
use bursar_model::flow::StepLayout;

use super::core::{bucket, buckets};

/// What determines the layouts of captured steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Sequences in the largest step.
    pub sequences: usize,
    /// The most tokens of a sequence.
    pub context_tokens: usize,
    /// Axes of a position in this model.
    pub axes: usize,
}

impl GraphShape {
    /// The layout of the arrays of a captured step of `rows` rows.
    pub fn layout(&self, rows: usize) -> StepLayout {
        StepLayout::decode(rows, self.axes, self.context_tokens)
    }

    /// Bytes of the largest step's inputs, in whole pages.
    pub fn bytes(&self, page: Bytes) -> Bytes {
        DType::U32.bytes(self.layout(self.sequences).words()).round_up(page)
    }

    /// The layout of a step of `rows` decoding sequences: that of the smallest size that holds it. None if none does.
    pub fn layout_holding(&self, rows: usize) -> Option<StepLayout> {
        bucket(rows, self.sequences).map(|rows| self.layout(rows))
    }

    /// The sizes in which steps are captured.
    pub fn buckets(&self) -> Vec<usize> {
        buckets(self.sequences)
    }
}
