//! Where captured steps find their inputs: one place for all sizes, as the steps of a lane are in order.

use std::sync::OnceLock;

use bursar_budgets::{Bytes, Lease, Segment};
use bursar_kernels::{DType, Tensor};
use bursar_model::flow::StepLayout;

use super::buckets;

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

    /// The sizes that steps are captured in.
    pub fn buckets(&self) -> Vec<usize> {
        buckets(self.sequences)
    }
}

/// The memory of those inputs, and what pays for the graphs themselves.
pub struct GraphInputs {
    segment: Segment,
    shape: GraphShape,
    /// The driver holds as much for the graphs, at no address of ours.
    paid: OnceLock<Lease>,
}

impl GraphInputs {
    /// A segment that is backed for the inputs of the largest step of `shape`.
    ///
    /// # Panics
    /// If it is backed for less.
    pub fn over(segment: Segment, shape: GraphShape) -> Self {
        let bytes = DType::U32.bytes(shape.layout(shape.sequences).words());
        assert!(bytes <= segment.backed(), "inputs of {bytes} in {}", segment.backed());
        GraphInputs { segment, shape, paid: OnceLock::new() }
    }

    /// What the layouts follow from.
    pub fn shape(&self) -> GraphShape {
        self.shape
    }

    /// `[words]` u32 for a step of `layout`, which must be one of the [shape](Self::shape)'s.
    pub fn tensor(&self, layout: &StepLayout) -> Tensor<'_> {
        assert!(layout.tokens <= self.shape.sequences && *layout == self.shape.layout(layout.tokens), "{layout:?}");
        // SAFETY: the segment is backed for the largest layout and lives as long as the borrow; only the step lane touches
        // it, one pass after the other.
        unsafe { Tensor::persistent(self.segment.address(), [layout.words()], DType::U32) }
    }

    /// Keeps what pays for the graphs, for as long as this lives: longer than any lane that works in this memory, and so
    /// than its graphs. A second lease is dropped.
    pub fn pay(&self, lease: Lease) {
        drop(self.paid.set(lease));
    }

    /// What is leased for the graphs, once they are captured.
    pub fn paid(&self) -> Bytes {
        self.paid.get().map_or(Bytes::ZERO, Lease::bytes)
    }
}
