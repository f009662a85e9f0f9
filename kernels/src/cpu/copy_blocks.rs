//! Copies of blocks and rows. On this backend, both sides are host memory.

use std::time::Instant;

use crate::{
    KernelError,
    calls::{BlockRange, Copied, CopyBlocks, Copying},
};

pub(super) fn copy_blocks(call: CopyBlocks<'_>) -> Result<Box<dyn Copying>, KernelError> {
    let begun = Instant::now();
    let each = |ranges: &[BlockRange], is_to_host: bool| {
        for pieces in call.pieces {
            for range in ranges {
                let device = pieces.block(range.block).0 as *mut u8;
                let (host, bytes) = (pieces.slot(range.slot), pieces.bytes(range.count));
                let (from, to) = if is_to_host { (device, host) } else { (host, device) };
                // SAFETY: the code that created the two memories guarantees that their bytes are
                // valid. The op layer has checked that blocks and slots are in bounds, and slots do
                // not overlap device segments.
                unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, bytes.as_usize()) };
            }
        }
    };
    each(&call.to_host, true);
    each(&call.to_device, false);
    Ok(Box::new(Copied(begun.elapsed())))
}
