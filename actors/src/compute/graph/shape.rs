//! Pure: sizes of captured steps and the layout of their inputs.

use bursar_budgets::Bytes;
use bursar_kernels::DType;
use bursar_model::flow::StepLayout;

use super::core::{bucket, buckets};

/// Limits that determine the layouts of captured steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Sequences in the largest step.
    pub sequences: usize,
    /// Maximum tokens of a sequence.
    pub context_tokens: usize,
    /// Axes of a token position in this model.
    pub axes: usize,
}

impl GraphShape {
    /// The layout of the arrays of a captured step of `rows` rows.
    pub fn layout(&self, rows: usize) -> StepLayout {
        StepLayout::decode(rows, self.axes, self.context_tokens)
    }

    /// Bytes of the inputs of the largest step, in whole pages.
    pub fn bytes(&self, page: Bytes) -> Bytes {
        DType::U32.bytes(self.layout(self.sequences).words()).round_up(page)
    }

    /// The layout of the smallest size that holds a step of `rows` decoding sequences. `None`
    /// if no size does.
    pub fn layout_holding(&self, rows: usize) -> Option<StepLayout> {
        bucket(rows, self.sequences).map(|rows| self.layout(rows))
    }

    /// The sizes of captured steps, in rows.
    pub fn buckets(&self) -> Vec<usize> {
        buckets(self.sequences)
    }
}
