//! Slots in host memory for KV blocks, rows of picture embeddings, and states that are copied from
//! the device.

use bursar_budgets::Bytes;

/// Slots in host memory: `[layers, slots]` pieces of `bytes` bytes. A slot has the layout of one
/// block of keys and values, of one row of picture embeddings (with one layer), or of one
/// sequence's state.
#[derive(Debug)]
pub struct HostStore {
    address: *mut u8,
    pub(crate) layers: usize,
    pub(crate) slots: usize,
    pub(crate) bytes: Bytes,
}

impl HostStore {
    /// Creates slots at `address`, each with `bytes` bytes for each of `layers` layers.
    ///
    /// # Safety
    /// As long as copies use these slots, `address` must be the start of `layers * slots * bytes`
    /// bytes of host memory that only copies of the same lane access. For a GPU the memory must be
    /// page-locked.
    pub unsafe fn new(address: *mut u8, layers: usize, slots: usize, bytes: Bytes) -> Self {
        HostStore { address, layers, slots, bytes }
    }

    /// Returns the address of the first slot of a layer.
    pub(crate) fn layer(&self, layer: usize) -> *mut u8 {
        self.address.wrapping_add(self.bytes.as_usize() * layer * self.slots)
    }
}
