//! Copies between the device and host memory that run concurrently with passes: whole blocks of
//! keys and values, and rows of pictures.

use std::time::Duration;

use bursar_budgets::{Address, Bytes};

use crate::{Backend, HostBlocks, HostRows, KernelError, KvLayer, Tensor};

/// The copy of one block, over all layers, or of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block or row on the device.
    pub block: u32,
    /// The slot in host memory.
    pub slot: u32,
}

/// Copies in a fixed order: first all copies to the host, then all copies to the device.
///
/// Passes that start later do not write before the copies to the host are done. Copies to the
/// device are complete only when the host has observed their completion. Until then, no pass may
/// use the copied blocks. Data that is copied to the host must have been written by passes whose
/// completion the host has already observed. Copies that were started earlier run first.
#[non_exhaustive]
pub struct Call<'a> {
    /// Addresses of blocks and slots: one entry per layer of the KV cache, or a single entry for
    /// a cache of rows.
    pub pieces: &'a [Pieces],
    /// Ranges of blocks to copy to slots.
    pub to_host: Vec<BlockRange>,
    /// Ranges of blocks to copy from slots.
    pub to_device: Vec<BlockRange>,
}

/// The addresses of a layer's blocks and slots. Blocks are contiguous, and so are slots.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// Address of the first block.
    device: Address,
    /// Address of the first slot.
    host: *mut u8,
    /// The length of each block and slot.
    bytes: Bytes,
}

impl Pieces {
    pub(crate) fn block(&self, block: u32) -> Address {
        self.device.offset(self.bytes * u64::from(block))
    }

    pub(crate) fn slot(&self, slot: u32) -> *mut u8 {
        // `wrapping_add` is sufficient, because `copy` below has checked that the
        // slot is in bounds.
        self.host.wrapping_add(self.bytes(slot).as_usize())
    }

    /// Returns the bytes of `count` adjacent blocks.
    pub(crate) fn bytes(&self, count: u32) -> Bytes {
        self.bytes * u64::from(count)
    }
}

/// Adjacent blocks whose slots are adjacent too, so that they need one copy per layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The first block.
    pub block: u32,
    /// Slot of the first block.
    pub slot: u32,
    /// Number of blocks.
    pub count: u32,
}

/// Copies in progress. The value may be dropped before the copies end.
pub trait Copying {
    /// Returns `true` if [`wait`](Copying::wait) would return at once. This method never blocks.
    fn has_come(&self) -> bool;

    /// Waits until all copies are done, and returns the time that the device took for the copies.
    ///
    /// # Errors
    /// Any error that the device reports for the copies.
    fn wait(self: Box<Self>) -> Result<Duration, KernelError>;
}

/// Copies that were done synchronously.
pub(crate) struct Copied(pub(crate) Duration);

impl Copying for Copied {
    fn has_come(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Duration, KernelError> {
        Ok(self.0)
    }
}

/// Starts copies of blocks of `layers` to and from slots of `host`; see [`Call`].
///
/// # Errors
/// The device refuses the copies, or is lost.
///
/// # Panics
/// If the shapes differ, or a block or slot is out of bounds.
pub fn copy_blocks<B: Backend>(
    backend: &B,
    layers: &[KvLayer],
    host: &HostBlocks,
    to_host: &[BlockCopy],
    to_device: &[BlockCopy],
) -> Result<Box<dyn Copying>, KernelError> {
    assert!(
        layers.len() == host.shape.layers && layers.iter().all(|layer| layer.shape == host.shape),
        "the blocks of {} layers are not those of {:?}",
        layers.len(),
        host.shape
    );
    let blocks = layers.iter().map(|layer| layer.blocks).min().unwrap_or(0);
    let pieces = |(number, layer): (usize, &KvLayer)| Pieces {
        device: layer.piece(0),
        host: host.layer(number),
        bytes: host.shape.block_bytes(),
    };
    let pieces: Vec<_> = layers.iter().enumerate().map(pieces).collect();
    copy(backend, &pieces, (blocks, host.slots), to_host, to_device)
}

/// Starts copies of rows of `cache`, `[rows, width]`, to and from slots of `host`; see [`Call`].
///
/// # Errors
/// The same as for [`copy_blocks`].
///
/// # Panics
/// If rows and slots differ in length, or a row or slot is out of bounds.
pub fn copy_rows<B: Backend>(
    backend: &B,
    cache: &Tensor<'_>,
    host: &HostRows,
    to_host: &[BlockCopy],
    to_device: &[BlockCopy],
) -> Result<Box<dyn Copying>, KernelError> {
    let bytes = cache.dtype().bytes(cache.columns());
    assert!(cache.is_contiguous() && bytes == host.row_bytes, "rows of {bytes} in slots of {}", host.row_bytes);
    let pieces = [Pieces { device: cache.address(), host: host.address, bytes }];
    copy(backend, &pieces, (cache.rows(), host.slots), to_host, to_device)
}

fn copy<B: Backend>(
    backend: &B,
    pieces: &[Pieces],
    (blocks, slots): (usize, usize),
    to_host: &[BlockCopy],
    to_device: &[BlockCopy],
) -> Result<Box<dyn Copying>, KernelError> {
    for copy in to_host.iter().chain(to_device) {
        let is_there = (copy.block as usize) < blocks && (copy.slot as usize) < slots;
        assert!(is_there, "{copy:?} in {blocks} blocks and {slots} slots");
    }
    backend.copy_blocks(Call { pieces, to_host: stretches(to_host), to_device: stretches(to_device) })
}

/// Joins copies that are adjacent on both sides.
fn stretches(copies: &[BlockCopy]) -> Vec<BlockRange> {
    let mut stretches: Vec<BlockRange> = Vec::new();
    for BlockCopy { block, slot } in copies.iter().copied() {
        match stretches.last_mut() {
            Some(last) if (last.block + last.count, last.slot + last.count) == (block, slot) => last.count += 1,
            _ => stretches.push(BlockRange { block, slot, count: 1 }),
        }
    }
    stretches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_both_sides_are_one_piece() {
        let copies = [(3, 7), (4, 8), (6, 9), (7, 11), (8, 12)].map(|(block, slot)| BlockCopy { block, slot });
        let joined = [(3, 7, 2), (6, 9, 1), (7, 11, 2)].map(|(block, slot, count)| BlockRange { block, slot, count });
        assert_eq!((stretches(&copies), stretches(&[])), (joined.to_vec(), Vec::new()));
    }
}
