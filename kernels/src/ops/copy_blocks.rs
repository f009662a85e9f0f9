//! Copies between the device and host memory that run beside passes: of whole blocks of keys and values, and of rows of
//! pictures.

use std::time::Duration;

use bursar_budgets::{Address, Bytes};

use crate::{Backend, HostBlocks, HostRows, KernelError, KvLayer, Tensor};

/// One block's copy, over all layers, or one row's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block or row on the device.
    pub block: u32,
    /// The slot in host memory.
    pub slot: u32,
}

/// Copies in one order: all to the host, then all to the device.
///
/// Passes begun later write only after those to the host. Those to the device are done when the host has heard so, and
/// until then no pass may use their blocks. What is copied to the host must have been written by passes that the host
/// has seen the end of. Copies that were begun earlier come before.
#[non_exhaustive]
pub struct Call<'a> {
    /// Where blocks and slots are: for each layer of the cache, or for its rows.
    pub pieces: &'a [Pieces],
    /// Stretches of blocks to copy to slots.
    pub to_host: Vec<Stretch>,
    /// Stretches of blocks to copy from slots.
    pub to_device: Vec<Stretch>,
}

/// The blocks of a layer and its slots, each one after another.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// The first block.
    device: Address,
    /// The first slot.
    host: *mut u8,
    /// The length of each.
    bytes: Bytes,
}

impl Pieces {
    /// Where a block is.
    pub(crate) fn block(&self, block: u32) -> Address {
        self.device.offset(self.bytes * u64::from(block))
    }

    /// Where a slot is.
    pub(crate) fn slot(&self, slot: u32) -> *mut u8 {
        // Wrapping, because whether it is inside is the front's to check.
        self.host.wrapping_add(self.bytes(slot).as_usize())
    }

    /// Bytes of neighbours.
    pub(crate) fn bytes(&self, count: u32) -> Bytes {
        self.bytes * u64::from(count)
    }
}

/// Neighbouring blocks whose slots are neighbours: one piece a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The first block.
    pub block: u32,
    /// Its slot.
    pub slot: u32,
    /// How many.
    pub count: u32,
}

/// Copies under way. It may be dropped before they end.
pub trait Copying {
    /// Whether [`wait`](Copying::wait) would return at once. It never blocks.
    fn has_come(&self) -> bool;

    /// Waits until all are done, and returns how long the device took for them.
    ///
    /// # Errors
    /// Any error the device reports for them.
    fn wait(self: Box<Self>) -> Result<Duration, KernelError>;
}

/// Copies that were made at once.
pub(crate) struct Copied(pub(crate) Duration);

impl Copying for Copied {
    fn has_come(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Duration, KernelError> {
        Ok(self.0)
    }
}

/// Begins copies of blocks of `layers` to and from slots of `host`; see [`Call`].
///
/// # Errors
/// The device refuses them, or is lost.
///
/// # Panics
/// If the shapes differ, or a block or slot is not there.
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

/// Begins copies of rows of `cache`, `[rows, width]`, to and from slots of `host`; see [`Call`].
///
/// # Errors
/// As [`copy_blocks`].
///
/// # Panics
/// If a row is as long as no slot, or a row or slot is not there.
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

/// Joins copies that follow each other on both sides.
fn stretches(copies: &[BlockCopy]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for BlockCopy { block, slot } in copies.iter().copied() {
        match stretches.last_mut() {
            Some(last) if (last.block + last.count, last.slot + last.count) == (block, slot) => last.count += 1,
            _ => stretches.push(Stretch { block, slot, count: 1 }),
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
        let joined = [(3, 7, 2), (6, 9, 1), (7, 11, 2)].map(|(block, slot, count)| Stretch { block, slot, count });
        assert_eq!((stretches(&copies), stretches(&[])), (joined.to_vec(), Vec::new()));
    }
}
