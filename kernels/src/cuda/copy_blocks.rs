//! Copies of blocks and rows in a stream of their own, beside the passes of a lane.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bursar_budgets::{CudaDevice, DeviceError, Overhead};
use cudarc::driver::sys;

use super::{
    Cuda,
    stream::{Clock, Event, Stream},
};
use crate::{
    KernelError,
    ops::copy_blocks::{Call, Copying, Stretch},
};

/// Copies that an actor has under way at once, at most; each has a clock.
const UNDER_WAY: usize = 6;

/// What copies of blocks need on a device.
pub(super) struct CopyStream {
    stream: Overhead<Stream>,
    /// Recorded after copies to the host, for later passes to wait for.
    left: Event,
    clocks: Clocks,
}

/// Clocks that time nothing now.
#[derive(Clone)]
struct Clocks(Arc<Mutex<Vec<Clock>>>);

impl CopyStream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let stream = device.with_overhead("streams", || Stream::new(device))?;
        let clocks = (0..UNDER_WAY).map(|_| Clock::new(device)).collect::<Result<_, DeviceError>>()?;
        Ok(CopyStream { stream, left: Event::new(device)?, clocks: Clocks(Arc::new(Mutex::new(clocks))) })
    }

    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.stream.wait()
    }
}

/// One asynchronous copy for each layer and stretch. The copy engine takes a time beside the bytes of each: on an H200 single
/// blocks of 32 KiB move at 10 to 11 GB/s, neighbours at the bus's rate of 53 and more.
pub(super) fn copy_blocks(cuda: &Cuda, call: Call<'_>) -> Result<Box<dyn Copying>, KernelError> {
    cuda.enter_to_copy()?;
    let copies = cuda.copies.as_ref().expect("a lane with host memory to copy to has a stream for that");
    let clock = copies.clocks.take(&cuda.kernels.device)?;
    // Returns its clock also if a copy is refused: what was begun is waited for by the lane.
    let copying = Box::new(Running { clock: Some(clock), clocks: copies.clocks.clone() });
    let clock = copying.clock.as_ref().expect("it is there until it drops");
    clock.begin(&copies.stream)?;
    for pieces in call.pieces {
        for Stretch { block, slot, count } in call.to_host.iter().copied() {
            let (to, bytes) = (pieces.slot(slot), pieces.bytes(count).as_usize());
            // SAFETY: the makers of both vouch for their bytes, and the front has checked that these are theirs. The
            // slots are page-locked memory that outlives the lane.
            let copied =
                unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), pieces.block(block).0, bytes, copies.stream.raw()) };
            CudaDevice::said("cuMemcpyDtoHAsync", copied)?;
        }
    }
    if !call.to_host.is_empty() {
        copies.left.record(&copies.stream)?;
        copies.left.hold(&cuda.stream)?;
    }
    for pieces in call.pieces {
        for Stretch { block, slot, count } in call.to_device.iter().copied() {
            let (from, bytes) = (pieces.slot(slot), pieces.bytes(count).as_usize());
            // SAFETY: as above.
            let copied = unsafe {
                sys::cuMemcpyHtoDAsync_v2(pieces.block(block).0, from.cast_const().cast(), bytes, copies.stream.raw())
            };
            CudaDevice::said("cuMemcpyHtoDAsync", copied)?;
        }
    }
    clock.end(&copies.stream)?;
    Ok(copying)
}

impl Clocks {
    fn take(&self, device: &Arc<CudaDevice>) -> Result<Clock, DeviceError> {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.map_or_else(|| Clock::new(device), Ok)
    }
}

/// Copies on the device.
struct Running {
    clock: Option<Clock>,
    clocks: Clocks,
}

impl Copying for Running {
    fn has_come(&self) -> bool {
        self.clock.as_ref().is_some_and(Clock::is_past)
    }

    fn wait(self: Box<Self>) -> Result<Duration, KernelError> {
        let clock = self.clock.as_ref().expect("it is there until it drops");
        Ok(Duration::from_secs_f32(clock.milliseconds()?.max(0.0) / 1000.0))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.clocks.0.lock().unwrap_or_else(PoisonError::into_inner).extend(self.clock.take());
    }
}
