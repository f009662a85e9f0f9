//! Copies between host and device.

use std::time::Duration;

use bursar_budgets::{Address, Bytes};

use crate::{KernelError, Tensor};

/// Copies `source` to the device.
#[non_exhaustive]
pub struct Upload<'a> {
    /// The elements' bytes, row by row.
    pub source: &'a [u8],
    /// Contiguous, of the same size in bytes.
    pub out: Tensor<'a>,
}

/// Copies `source` to the host.
#[non_exhaustive]
pub struct Download<'a> {
    pub source: Tensor<'a>,
    /// Memory of the same size in bytes as `source`.
    pub out: &'a mut [u8],
}

/// Starts a copy of `source` to the host.
#[non_exhaustive]
pub struct DownloadLater<'a> {
    /// Contiguous. If `source` is empty, the arrival only marks the end of all earlier work.
    pub source: Tensor<'a>,
}

/// A copy to the host that is in progress. The value may be dropped before the copy ends. The
/// implementation must then ensure that the copy does not write to memory that is reused.
pub trait Arrival {
    /// Returns `true` if [`wait`](Arrival::wait) would return at once. This method never blocks.
    fn is_ready(&self) -> bool;

    /// Waits until the device has finished the copy, and therefore all earlier work, and fills
    /// `out`, which is as long as the source.
    ///
    /// # Errors
    /// Any error that the device reports for that work.
    fn wait(self: Box<Self>, out: &mut [u8]) -> Result<(), KernelError>;
}

/// Copies in a fixed order: first all copies to the host, then all copies to the device.
///
/// Passes that start later do not write before the copies to the host are done. Copies to the
/// device are complete only when the host has observed their completion. Until then, no pass may
/// use the copied blocks. Data that is copied to the host must have been written by passes whose
/// completion the host has already observed. Copies that were started earlier run first.
#[non_exhaustive]
pub struct CopyBlocks<'a> {
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
    pub(crate) device: Address,
    /// Address of the first slot.
    pub(crate) host: *mut u8,
    /// The length of each block and slot.
    pub(crate) bytes: Bytes,
}

impl Pieces {
    pub(crate) fn block(&self, block: u32) -> Address {
        self.device.offset(self.bytes * u64::from(block))
    }

    pub(crate) fn slot(&self, slot: u32) -> *mut u8 {
        // `wrapping_add` needs no `unsafe`. `ops::copy_blocks` checks that the slot is in bounds.
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
    /// Index of the first block in the KV cache.
    pub block: u32,
    /// Slot of the first block.
    pub slot: u32,
    /// Number of adjacent blocks, at least 1.
    pub count: u32,
}

/// Copies in progress. The value may be dropped before the copies end.
pub trait Copying {
    /// Returns `true` if [`wait`](Copying::wait) would return at once. This method never blocks.
    fn is_ready(&self) -> bool;

    /// Waits until all copies are done, and returns the time that the device took for the copies.
    ///
    /// # Errors
    /// Any error that the device reports for the copies.
    fn wait(self: Box<Self>) -> Result<Duration, KernelError>;
}

/// Copies that were done synchronously.
pub(crate) struct Copied(pub(crate) Duration);

impl Copying for Copied {
    fn is_ready(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Duration, KernelError> {
        Ok(self.0)
    }
}
