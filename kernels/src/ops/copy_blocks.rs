//! Copies between the device and host memory that run concurrently with passes: whole blocks of
//! keys and values, and rows of pictures.

use crate::{
    Backend, HostBlocks, HostRows, KernelError, KvLayer, Tensor,
    calls::{self, BlockRange, Pieces},
};

pub use crate::calls::Copying;

/// The copy of one block, over all layers, or of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block or row on the device.
    pub block: u32,
    /// The slot in host memory.
    pub slot: u32,
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
    host: &HostBlocks,
    to_host: &[BlockCopy],
    to_device: &[BlockCopy],
) -> Result<Box<dyn Copying>, KernelError> {
    assert!(
        layers.len() == host.shape.layers && layers.iter().all(|layer| layer.shape == host.shape),
        "{} layers of blocks do not match the host blocks of {:?}",
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

/// Starts copies of rows of `cache`, `[rows, width]`, to and from slots of `host`; see [`calls::CopyBlocks`].
///
/// # Errors
/// The errors of [`copy_blocks`].
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
    assert!(
        cache.is_contiguous() && bytes == host.row_bytes,
        "rows of {bytes} do not match slots of {}",
        host.row_bytes
    );
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
        assert!(is_there, "{copy:?} is outside {blocks} blocks and {slots} slots");
    }
    backend.copy_blocks(calls::CopyBlocks { pieces, to_host: stretches(to_host), to_device: stretches(to_device) })
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
    fn blocks_adjacent_on_both_sides_are_one_piece() {
        let copies = [(3, 7), (4, 8), (6, 9), (7, 11), (8, 12)].map(|(block, slot)| BlockCopy { block, slot });
        let joined = [(3, 7, 2), (6, 9, 1), (7, 11, 2)].map(|(block, slot, count)| BlockRange { block, slot, count });
        assert_eq!((stretches(&copies), stretches(&[])), (joined.to_vec(), Vec::new()));
    }
}
