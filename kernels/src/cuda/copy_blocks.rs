//! Copies of KV blocks and of picture rows to host memory and back, in a separate stream,
//! concurrently with the passes of a lane.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bursar_budgets::{CudaDevice, DeviceError, Overhead};
use cudarc::driver::sys;

use super::stream::{Clock, Event, Stream};
use crate::{
    KernelError,
    calls::{BlockRange, CopyBlocks, Copying, Pieces},
    ops::copy_blocks::{KINDS_MAX, PREPARED_JOBS},
};

/// Number of clocks that are created in advance. If more copies are in flight, further clocks are
/// created while the model serves requests.
const CLOCKS: usize = PREPARED_JOBS * KINDS_MAX;

/// Maximum number of pieces that are passed to the driver in one call. On an H100, thousands of
/// pieces in one call transfer at only four fifths of the bandwidth.
const BATCH: usize = 256;

/// The stream, events and clocks for copies of blocks on one device.
pub(super) struct CopyStream {
    stream: Overhead<Stream>,
    /// Event recorded after copies to the host, so that later passes can wait for these copies.
    left: Event,
    clocks: Clocks,
    /// `true` if the driver accepts many pieces in one call, as drivers of CUDA 12.8 and later do.
    takes_many: bool,
}

/// Source address, destination address, and number of bytes.
type Piece = (sys::CUdeviceptr, sys::CUdeviceptr, usize);

/// Returns the device address, host address and length of a contiguous range in one layer.
fn sides(pieces: &Pieces, range: &BlockRange) -> Piece {
    let host = pieces.slot(range.slot).addr() as sys::CUdeviceptr;
    (pieces.block(range.block).0, host, pieces.bytes(range.count).as_usize())
}

/// Free clocks. A [`Clock`] measures the time of one copy.
#[derive(Clone)]
struct Clocks(Arc<Mutex<Vec<Clock>>>);

impl CopyStream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let stream = device.with_overhead("streams", || Stream::new(device))?;
        let clocks = (0..CLOCKS).map(|_| Clock::new(device)).collect::<Result<_, DeviceError>>()?;
        let (left, clocks) = (Event::new(device)?, Clocks(Arc::new(Mutex::new(clocks))));
        // SAFETY: the symbol is only looked up, and nothing is called.
        let takes_many = unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuMemcpyBatchAsync\0").is_ok() };
        Ok(CopyStream { stream, left, clocks, takes_many })
    }

    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.stream.wait()
    }

    /// # Safety
    /// Until a piece is copied, the memory of its source and destination must stay valid, and the
    /// memory on the host must be page-locked.
    unsafe fn copy(&self, pieces: &[Piece]) -> Result<(), DeviceError> {
        if !self.takes_many {
            return pieces.iter().try_for_each(|(from, to, bytes)| {
                // SAFETY: the caller guarantees that the memory is valid; page-locked memory has
                // the same address on host and device.
                let copied = unsafe { sys::cuMemcpyAsync(*to, *from, *bytes, self.stream.raw()) };
                CudaDevice::check("cuMemcpyAsync", copied)
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
            // SAFETY: the caller guarantees that the memory is valid, and each
            // list has `pieces.len()` entries.
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
            CudaDevice::check("cuMemcpyBatchAsync", copied)
        })
    }

    /// Copies one piece for each layer and contiguous range, many pieces per driver call if the
    /// driver supports this. The driver then keeps all of the copies in flight; separate calls take
    /// about 2.5 us each in addition to the transfer time. Later work in the stream `passes` waits
    /// for the copies to the host.
    pub(super) fn start(
        &self,
        passes: &Stream,
        device: &Arc<CudaDevice>,
        call: CopyBlocks<'_>,
    ) -> Result<Box<dyn Copying>, DeviceError> {
        let clock = self.clocks.take(device)?;
        // `Running` returns its clock when it is dropped, even if a copy is refused. The lane waits
        // for the copies that have started.
        let copying = Box::new(Running { clock: Some(clock), clocks: self.clocks.clone() });
        let clock = copying.clock.as_ref().expect("the field is set until the value is dropped");
        let each = |ranges: &[BlockRange]| -> Vec<Piece> {
            call.pieces.iter().flat_map(|pieces| ranges.iter().map(|range| sides(pieces, range))).collect()
        };
        let back = |(device, host, bytes): Piece| (host, device, bytes);
        clock.begin(&self.stream)?;
        // SAFETY: the creators of the blocks and of the slots guarantee that their memory is valid,
        // and the op layer has checked that the ranges lie within this memory. The slots are
        // page-locked memory that outlives the lane.
        unsafe { self.copy(&each(&call.to_host))? };
        if !call.to_host.is_empty() {
            self.left.record(&self.stream)?;
            self.left.hold(passes)?;
        }
        // SAFETY: the creators of the blocks and of the slots guarantee that their memory is valid,
        // and the op layer has checked that the ranges lie within this memory. The slots are
        // page-locked memory that outlives the lane.
        unsafe { self.copy(&each(&call.to_device).into_iter().map(back).collect::<Vec<_>>())? };
        clock.end(&self.stream)?;
        Ok(copying)
    }
}

impl Clocks {
    fn take(&self, device: &Arc<CudaDevice>) -> Result<Clock, DeviceError> {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.map_or_else(|| Clock::new(device), Ok)
    }
}

/// Copies that were submitted to the device.
struct Running {
    clock: Option<Clock>,
    clocks: Clocks,
}

impl Copying for Running {
    fn is_ready(&self) -> bool {
        self.clock.as_ref().is_some_and(Clock::is_past)
    }

    fn wait(self: Box<Self>) -> Result<Duration, KernelError> {
        let clock = self.clock.as_ref().expect("the field is set until the value is dropped");
        Ok(Duration::from_secs_f32(clock.milliseconds()?.max(0.0) / 1000.0))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.clocks.0.lock().unwrap_or_else(PoisonError::into_inner).extend(self.clock.take());
    }
}
