//! The captured CUDA graphs of a lane, two per size.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use bursar_kernels::Graph;
use bursar_model::flow::LogitsOf;

use crate::compute::graph::GraphKey;

/// The graphs that a lane has captured. They must be dropped before the memory that they use.
#[derive(Default)]
pub(super) struct Graphs {
    pub(super) by_size: RefCell<BTreeMap<GraphKey, Captured>>,
    /// Reused buffer for the inputs of a step during upload. For hundreds of long sequences the
    /// inputs take half a megabyte.
    pub(super) words: Cell<Vec<u32>>,
}

/// The graphs of one size. The argmax of the logits has a separate graph, which reads the logits
/// once, reads no parameters, and gathers no logits from other ranks.
pub(super) struct Captured {
    pub(super) greedy: Box<dyn Graph>,
    pub(super) asked: Box<dyn Graph>,
}

impl Graphs {
    /// Drops the graphs of one size.
    pub(super) fn forget(&self, size: GraphKey) {
        self.by_size.borrow_mut().remove(&size);
    }
}

impl Captured {
    pub(super) fn of(&self, tokens: Tokens) -> &dyn Graph {
        match tokens {
            Tokens::Greedy => &*self.greedy,
            Tokens::Asked => &*self.asked,
        }
    }
}

/// How a pass chooses the tokens that it writes to the sampling buffers.
#[derive(Clone, Copy)]
pub(super) enum Tokens {
    Greedy,
    /// Samples with the parameters that are in the sampling buffers when the pass runs.
    Asked,
}

impl Tokens {
    pub(super) fn logits_of(self) -> LogitsOf {
        match self {
            Tokens::Greedy => LogitsOf::OwnRank,
            Tokens::Asked => LogitsOf::AllRanks,
        }
    }
}
