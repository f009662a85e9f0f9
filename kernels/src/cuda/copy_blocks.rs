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
    ops::copy_blocks::{Call, Copying, Pieces, Stretch},
};

/// Copies that an actor has under way at once, at most; each has a clock.
const UNDER_WAY: usize = 6;

/// Pieces that are handed to the driver at once, at most: on an H100 thousands at once move at four fifths of their rate.
const BATCH: usize = 256;

/// What copies of blocks need on a device.
pub(super) struct CopyStream {
    stream: Overhead<Stream>,
    /// Recorded after copies to the host, for later passes to wait for.
    left: Event,
    clocks: Clocks,
    /// The driver takes many pieces in one call, as those of CUDA 12.8 do.
    takes_many: bool,
}

/// From where to where, and how many bytes.
type Piece = (sys::CUdeviceptr, sys::CUdeviceptr, usize);

/// A stretch of one layer, on the device, in host memory, and its length.
fn sides(pieces: &Pieces, stretch: &Stretch) -> Piece {
    let host = pieces.slot(stretch.slot).addr() as sys::CUdeviceptr;
    (pieces.block(stretch.block).0, host, pieces.bytes(stretch.count).as_usize())
}

/// Clocks that time nothing now.
#[derive(Clone)]
struct Clocks(Arc<Mutex<Vec<Clock>>>);

impl CopyStream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let stream = device.with_overhead("streams", || Stream::new(device))?;
        let clocks = (0..UNDER_WAY).map(|_| Clock::new(device)).collect::<Result<_, DeviceError>>()?;
        let (left, clocks) = (Event::new(device)?, Clocks(Arc::new(Mutex::new(clocks))));
        // SAFETY: the name is looked up, and nothing is called.
        let takes_many = unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuMemcpyBatchAsync\0").is_ok() };
        Ok(CopyStream { stream, left, clocks, takes_many })
    }

    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.stream.wait()
    }

    /// # Safety
    /// Every piece's bytes are there on both sides until it is copied, and those of the host are page-locked.
    unsafe fn copy(&self, pieces: &[Piece]) -> Result<(), DeviceError> {
        if !self.takes_many {
            return pieces.iter().try_for_each(|(from, to, bytes)| {
                // SAFETY: as the caller promises; page-locked memory has one address for all.
                let copied = unsafe { sys::cuMemcpyAsync(*to, *from, *bytes, self.stream.raw()) };
                CudaDevice::said("cuMemcpyAsync", copied)
            });
        }
        pieces.chunks(BATCH).try_for_each(|pieces| {
            let mut from: Vec<_> = pieces.iter().map(|piece| piece.0).collect();
            let mut to: Vec<_> = pieces.iter().map(|piece| piece.1).collect();
            let mut bytes: Vec<_> = pieces.iter().map(|piece| piece.2).collect();
            let anywhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
            let mut order = sys::CUmemcpyAttributes {
                srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                srcLocHint: anywhere,
                dstLocHint: anywhere,
                flags: 0,
            };
            let (mut first, mut failed) = (0, 0);
            // SAFETY: as the caller promises; the lists are as long as they are said to be.
            let copied = unsafe {
                sys::cuMemcpyBatchAsync(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    pieces.len(),
                    &mut order,
                    &mut first,
                    1,
                    &mut failed,
                    self.stream.raw(),
                )
            };
            CudaDevice::said("cuMemcpyBatchAsync", copied)
        })
    }
}

/// A piece for each layer and stretch, many in one call: the driver has them all under way, where one after another takes
/// some 2.5 us beside its bytes.
pub(super) fn copy_blocks(cuda: &Cuda, call: Call<'_>) -> Result<Box<dyn Copying>, KernelError> {
    cuda.enter_to_copy()?;
    let copies = cuda.copies.as_ref().expect("a lane with host memory to copy to has a stream for that");
    let clock = copies.clocks.take(&cuda.kernels.device)?;
    // Returns its clock also if a copy is refused: what was begun is waited for by the lane.
    let copying = Box::new(Running { clock: Some(clock), clocks: copies.clocks.clone() });
    let clock = copying.clock.as_ref().expect("it is there until it drops");
    let each = |stretches: &[Stretch]| -> Vec<Piece> {
        call.pieces.iter().flat_map(|pieces| stretches.iter().map(|stretch| sides(pieces, stretch))).collect()
    };
    let back = |(device, host, bytes): Piece| (host, device, bytes);
    clock.begin(&copies.stream)?;
    // SAFETY: the makers of both sides vouch for their bytes, and the front has checked that these are theirs. The slots
    // are page-locked memory that outlives the lane.
    unsafe { copies.copy(&each(&call.to_host))? };
    if !call.to_host.is_empty() {
        copies.left.record(&copies.stream)?;
        copies.left.hold(&cuda.stream)?;
    }
    // SAFETY: as above.
    unsafe { copies.copy(&each(&call.to_device).into_iter().map(back).collect::<Vec<_>>())? };
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
