//! Copies between the device and host memory that run concurrently with passes: whole blocks of
//! keys and values, rows of picture embeddings, and states of sequences.

use bursar_budgets::{Address, Bytes};

use crate::{
    Backend, HostStore, KernelError, KvLayer, StateLayer, Tensor,
    calls::{self, BlockRange, Pieces},
};

pub use crate::calls::Copying;

/// Number of concurrent copy jobs per lane for which a device creates timing events in advance.
/// More jobs may be in flight.
pub const PREPARED_JOBS: usize = 6;

/// Maximum number of kinds of content that one job copies: KV blocks and states. Each kind has a
/// separate [`Copying`].
pub const KINDS_MAX: usize = 2;

/// A copy of one block or one state over all layers, or of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block, the row, or the slot of the state on the device.
    pub block: u32,
    /// The slot in host memory.
    pub slot: u32,
}

/// Copies between the device and host memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyLists {
    /// Copies from the device to the host. They run first.
    pub to_host: Vec<BlockCopy>,
    /// Copies from the host to the device. No pass may use the destination of a copy before the
    /// copy has ended.
    pub to_device: Vec<BlockCopy>,
}

impl CopyLists {
    pub fn len(&self) -> usize {
        self.to_host.len() + self.to_device.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Starts copies of blocks of `layers` to and from slots of `host`; see [`calls::CopyBlocks`].
///
/// # Errors
/// The device refuses the copies, or is lost.
///
/// # Panics
/// If the shapes differ, or a block or slot is out of bounds.
pub fn copy_blocks<B: Backend>(
    backend: &B,
    layers: &[KvLayer],
    host: &HostStore,
    copies: &CopyLists,
) -> Result<Box<dyn Copying>, KernelError> {
    let blocks = layers.iter().map(|layer| layer.blocks).min().unwrap_or(0);
    copy(backend, layers.iter().map(|layer| (layer.piece(0), layer.shape.block_bytes())), blocks, host, copies)
}

/// Starts copies of rows of `cache`, `[rows, width]`, to and from slots of `host`; see
/// [`calls::CopyBlocks`].
///
/// # Errors
/// The errors of [`copy_blocks`].
///
/// # Panics
/// If rows and slots differ in length, or a row or slot is out of bounds.
pub fn copy_rows<B: Backend>(
    backend: &B,
    cache: &Tensor<'_>,
    host: &HostStore,
    copies: &CopyLists,
) -> Result<Box<dyn Copying>, KernelError> {
    assert!(cache.is_contiguous(), "the cache must be contiguous, because adjacent rows are copied as one range");
    let row = (cache.address(), cache.dtype().bytes(cache.columns()));
    copy(backend, [row].into_iter(), cache.rows(), host, copies)
}

/// Starts copies of states of `layers` to and from slots of `host`; see [`calls::CopyBlocks`].
///
/// # Errors
/// The same as for [`copy_blocks`].
///
/// # Panics
/// If the shapes differ, or a slot is out of bounds.
pub fn copy_states<B: Backend>(
    backend: &B,
    layers: &[StateLayer],
    host: &HostStore,
    copies: &CopyLists,
) -> Result<Box<dyn Copying>, KernelError> {
    let slots = layers.iter().map(StateLayer::slots).min().unwrap_or(0);
    copy(backend, layers.iter().map(|layer| (layer.address(), layer.shape().slot_bytes())), slots, host, copies)
}

/// Starts the listed copies. Each layer consists of `blocks` equal pieces, and is given by its
/// address and the bytes of a piece.
fn copy<B: Backend>(
    backend: &B,
    layers: impl ExactSizeIterator<Item = (Address, Bytes)>,
    blocks: usize,
    host: &HostStore,
    CopyLists { to_host, to_device }: &CopyLists,
) -> Result<Box<dyn Copying>, KernelError> {
    assert_eq!(layers.len(), host.layers, "the device and the host store have the same number of layers");
    let pieces = layers.enumerate().map(|(number, (device, bytes))| {
        assert_eq!(bytes, host.bytes, "pieces of layer {number} have the size of slots");
        Pieces { device, host: host.layer(number), bytes }
    });
    let pieces: Vec<_> = pieces.collect();
    for copy in to_host.iter().chain(to_device) {
        let is_there = (copy.block as usize) < blocks && (copy.slot as usize) < host.slots;
        assert!(is_there, "{copy:?} is outside {blocks} blocks and {} slots", host.slots);
    }
    let (to_host, to_device) = (ranges_of(to_host), ranges_of(to_device));
    backend.copy_blocks(calls::CopyBlocks { pieces: &pieces, to_host, to_device })
}

/// Joins copies that are adjacent both on the device and in host memory.
fn ranges_of(copies: &[BlockCopy]) -> Vec<BlockRange> {
    let mut ranges: Vec<BlockRange> = Vec::new();
    for BlockCopy { block, slot } in copies.iter().copied() {
        match ranges.last_mut() {
            Some(last) if (last.block + last.count, last.slot + last.count) == (block, slot) => last.count += 1,
            _ => ranges.push(BlockRange { block, slot, count: 1 }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_adjacent_in_blocks_and_slots_are_joined() {
        let copies = [(3, 7), (4, 8), (6, 9), (7, 11), (8, 12)].map(|(block, slot)| BlockCopy { block, slot });
        let joined = [(3, 7, 2), (6, 9, 1), (7, 11, 2)].map(|(block, slot, count)| BlockRange { block, slot, count });
        assert_eq!((ranges_of(&copies), ranges_of(&[])), (joined.to_vec(), Vec::new()));
    }
}
