//! Pure: copies of KV blocks and of states between the device and host memory.

use bursar_kernels::ops::copy_blocks::CopyLists;

/// Copies of blocks and of states, which must run in the order in which they are returned. Copies
/// to the host must also run before any later step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    pub blocks: CopyLists,
    pub states: CopyLists,
}

impl Copies {
    /// The cost of the copies, in copies of a block. Copying one state takes as long as copying
    /// `state_blocks` blocks.
    pub fn in_blocks(&self, state_blocks: usize) -> usize {
        self.blocks.len() + self.states.len() * state_blocks
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.states.is_empty()
    }
}
