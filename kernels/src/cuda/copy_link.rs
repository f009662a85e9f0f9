//! The link between GPU ranks that synchronize on the host: each rank copies the rows that the
//! other ranks contribute. No kernel waits for another rank, so a lane may use this link while
//! kernels of another lane wait for other ranks.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Address, Bytes, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::stream::Stream;
use crate::{DType, HostLink, KernelError, Rank, Tensor, calls, host_link::Contribution};

/// A rank's end of a link between GPU ranks that synchronize on the host, as host
/// ranks do; see [`HostLink`].
///
/// The link supports gathering, but not sums. A rank joins the collective when its stream has
/// completed all earlier work, and leaves the collective when its copies are done. The host
/// therefore waits for the stream in each operation, and the operation cannot be captured in a
/// graph.
pub struct CopyLink {
    host: HostLink,
    own: Context,
    /// For each rank, its context if this rank's device cannot read that rank's
    /// memory directly, otherwise `None`.
    beyond_reach: Vec<Option<Context>>,
}

#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: any thread may use a context handle, and the backends of the context's rank
// keep the context alive.
unsafe impl Send for Context {}

/// Rows of bytes on a device.
#[derive(Clone, Copy)]
pub(super) struct ByteRows {
    pub start: Address,
    /// Bytes from the start of one row to the start of the next.
    pub pitch: usize,
}

impl ByteRows {
    pub(super) fn of(tensor: &Tensor<'_>) -> Self {
        ByteRows { start: tensor.address(), pitch: bytes(tensor.dtype(), tensor.pitch()) }
    }

    /// Returns the same rows without the first `byte` bytes of each row.
    pub(super) fn at_byte(self, byte: usize) -> Self {
        ByteRows { start: self.start.offset(Bytes(byte as u64)), ..self }
    }

    /// Returns the same rows without the first `row` rows.
    pub(super) fn at_row(self, row: usize) -> Self {
        ByteRows { start: self.start.offset(Bytes((row * self.pitch) as u64)), ..self }
    }
}

/// Returns the bytes of `elements` elements.
pub(super) fn bytes(dtype: DType, elements: usize) -> usize {
    dtype.bytes(elements).as_usize()
}

/// Copies `rows` rows of `width` bytes in the stream, between memory that the
/// stream's device has mapped.
pub(super) fn copy_rows(
    stream: &Stream,
    from: ByteRows,
    to: ByteRows,
    [rows, width]: [usize; 2],
) -> Result<(), DeviceError> {
    if rows == 0 || width == 0 {
        return Ok(());
    }
    // A single row may have any pitch, even one that the driver would refuse.
    let (from_pitch, to_pitch) = if rows == 1 { (width, width) } else { (from.pitch, to.pitch) };
    if from_pitch == width && to_pitch == width {
        // SAFETY: the callers guarantee that both ranges are valid.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to.start.0, from.start.0, rows * width, stream.raw()) };
        return CudaDevice::check("cuMemcpyDtoDAsync", copied);
    }
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: from.start.0,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to.start.0,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: rows,
    };
    // SAFETY: the callers guarantee that all rows are valid; the driver reads the description
    // before the call returns.
    CudaDevice::check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) })
}

impl CopyLink {
    /// Creates the ends of a link between ranks on these devices, in the order of their indices. In
    /// each operation a rank waits up to `patience` for the other ranks.
    ///
    /// The memory of the tensors that ranks contribute must be [open](CudaDevice::open_to) to every
    /// device that can access it. For all other devices, the driver copies the tensors row by row.
    ///
    /// # Errors
    /// A device is lost.
    pub fn between(devices: &[Arc<CudaDevice>], patience: Duration) -> Result<Vec<CopyLink>, DeviceError> {
        let contexts = devices.iter().map(context).collect::<Result<Vec<_>, _>>()?;
        let ends = HostLink::between(devices.len(), patience).into_iter().zip(devices).zip(&contexts);
        let end = |((host, device), own): ((HostLink, &Arc<CudaDevice>), &Context)| {
            let beyond =
                |(other, context): (&Arc<CudaDevice>, &Context)| Ok((!device.reaches(other)?).then_some(*context));
            let beyond_reach = devices.iter().zip(&contexts).map(beyond).collect::<Result<_, DeviceError>>()?;
            Ok(CopyLink { host, own: *own, beyond_reach })
        };
        ends.map(end).collect()
    }

    /// Changes this end to behave as if no GPU could access another GPU's memory. Tests use this on
    /// GPUs that have peer access.
    ///
    /// # Errors
    /// A device is lost.
    pub fn without_reach(self, devices: &[Arc<CudaDevice>]) -> Result<CopyLink, DeviceError> {
        let beyond_reach =
            devices.iter().map(|device| Ok(Some(context(device)?))).collect::<Result<_, DeviceError>>()?;
        Ok(CopyLink { beyond_reach, ..self })
    }

    /// Returns this rank's position in the group.
    pub fn rank(&self) -> Rank {
        self.host.rank()
    }

    /// Gathers after all earlier work in `stream`. The device's context must be current on this
    /// thread.
    pub(super) fn all_gather(&self, stream: &Stream, call: calls::AllGather<'_>) -> Result<(), KernelError> {
        stream.wait()?;
        let mut copied = Ok(());
        let copies = |all: &[Contribution]| copied = self.copy_all(stream, all, &call.out);
        self.host.exchange(Contribution::of("all_gather", &call.part), copies)?;
        Ok(copied?)
    }

    /// Copies the rows of each rank to that rank's columns, and waits for the copies, because the
    /// other ranks may overwrite their rows after the collective.
    fn copy_all(&self, stream: &Stream, all: &[Contribution], out: &Tensor<'_>) -> Result<(), DeviceError> {
        for (rank, contributed) in all.iter().enumerate() {
            let ([rows, columns], dtype) = (contributed.shape, contributed.dtype);
            let width = bytes(dtype, columns);
            let from = ByteRows { start: contributed.start, pitch: bytes(dtype, contributed.pitch) };
            let to = ByteRows::of(out).at_byte(rank * width);
            match self.beyond_reach[rank].filter(|_| rank != self.rank().index()) {
                None => copy_rows(stream, from, to, [rows, width])?,
                Some(other) => (0..rows).try_for_each(|row| {
                    let (from, to) = (from.at_row(row).start, to.at_row(row).start);
                    // SAFETY: each rank guarantees that its rows are valid during the collective,
                    // and the contexts are alive.
                    let copied =
                        unsafe { sys::cuMemcpyPeerAsync(to.0, self.own.0, from.0, other.0, width, stream.raw()) };
                    CudaDevice::check("cuMemcpyPeerAsync", copied)
                })?,
            }
        }
        stream.wait()
    }
}

/// Returns the context of a device. The context is current on this thread afterward.
fn context(device: &Arc<CudaDevice>) -> Result<Context, DeviceError> {
    device.enter()?;
    let mut current = std::ptr::null_mut();
    // SAFETY: `current` is a local variable, so the driver may write the context to it.
    CudaDevice::check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
    Ok(Context(current))
}
