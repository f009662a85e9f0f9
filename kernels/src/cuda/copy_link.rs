//! The link between GPU ranks that meet on the host: each copies what the others have brought. No kernel waits for another
//! rank, so a lane may use it beside one whose kernels do.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Address, Bytes, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::{Cuda, stream::Stream};
use crate::{DType, HostLink, KernelError, Rank, Tensor, host_link::Brought, ops::all_gather};

/// A rank's end of a link between GPU ranks that meet on the host, as host ranks do; see [`HostLink`].
///
/// It gathers and does not sum. A rank comes to the meeting when its device has done all that it was given before, and
/// leaves it when its copies are done, so the host waits for the device in each operation. It cannot be captured.
pub struct CopyLink {
    host: HostLink,
    own: Context,
    /// In the order of the ranks: the context of one whose memory this rank's device cannot read by itself.
    beyond_reach: Vec<Option<Context>>,
}

#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a context may be named by any thread; here it is kept alive by the backends of its rank.
unsafe impl Send for Context {}

/// Rows of bytes on a device.
#[derive(Clone, Copy)]
pub(super) struct ByteRows {
    pub start: Address,
    /// Bytes from row to row.
    pub pitch: usize,
}

impl ByteRows {
    /// The rows of a tensor.
    pub(super) fn of(tensor: &Tensor<'_>) -> Self {
        ByteRows { start: tensor.address(), pitch: bytes(tensor.dtype(), tensor.pitch()) }
    }

    /// The same rows from this byte of each on.
    pub(super) fn at_byte(self, byte: usize) -> Self {
        ByteRows { start: self.start.offset(Bytes(byte as u64)), ..self }
    }

    /// The same rows from this one on.
    pub(super) fn at_row(self, row: usize) -> Self {
        ByteRows { start: self.start.offset(Bytes((row * self.pitch) as u64)), ..self }
    }
}

/// Bytes of so many elements.
pub(super) fn bytes(dtype: DType, elements: usize) -> usize {
    dtype.bytes(elements).as_usize()
}

/// Copies `rows` rows of `width` bytes in the stream, between memory that its device has mapped.
pub(super) fn copy_rows(
    stream: &Stream,
    from: ByteRows,
    to: ByteRows,
    [rows, width]: [usize; 2],
) -> Result<(), DeviceError> {
    if rows == 0 || width == 0 {
        return Ok(());
    }
    // Of one row the pitch means nothing, and may be less than a driver takes.
    let (from_pitch, to_pitch) = if rows == 1 { (width, width) } else { (from.pitch, to.pitch) };
    if from_pitch == width && to_pitch == width {
        // SAFETY: the callers vouch for both.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to.start.0, from.start.0, rows * width, stream.raw()) };
        return CudaDevice::said("cuMemcpyDtoDAsync", copied);
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
    // SAFETY: as above; the description is read before the call returns.
    CudaDevice::said("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) })
}

impl CopyLink {
    /// The ends of a link between ranks on these devices, in the order of their indices. A rank waits `patience` for the
    /// others in each operation.
    ///
    /// What ranks bring must be [open](CudaDevice::open_to) to those that reach it. From others it goes through the driver,
    /// row by row.
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

    /// The same end as it is between GPUs that cannot reach each other, for tests on GPUs that can.
    ///
    /// # Errors
    /// A device is lost.
    pub fn without_reach(self, devices: &[Arc<CudaDevice>]) -> Result<CopyLink, DeviceError> {
        let beyond_reach =
            devices.iter().map(|device| Ok(Some(context(device)?))).collect::<Result<_, DeviceError>>()?;
        Ok(CopyLink { beyond_reach, ..self })
    }

    /// Its place in the group.
    pub fn rank(&self) -> Rank {
        self.host.rank()
    }

    pub(super) fn all_gather(&self, cuda: &Cuda, call: all_gather::Call<'_>) -> Result<(), KernelError> {
        cuda.enter_to_copy()?;
        cuda.stream.wait()?;
        let mut copied = Ok(());
        let copies = |all: &[Brought]| copied = self.copy_all(&cuda.stream, all, &call.out);
        self.host.meet(Brought::of("all_gather", &call.part), copies)?;
        Ok(copied?)
    }

    /// Copies what each rank has brought to its columns, and waits: after the meeting the others may write theirs again.
    fn copy_all(&self, stream: &Stream, all: &[Brought], out: &Tensor<'_>) -> Result<(), DeviceError> {
        for (rank, brought) in all.iter().enumerate() {
            let ([rows, columns], dtype) = (brought.shape, brought.dtype);
            let width = bytes(dtype, columns);
            let from = ByteRows { start: brought.start, pitch: bytes(dtype, brought.pitch) };
            let to = ByteRows::of(out).at_byte(rank * width);
            match self.beyond_reach[rank].filter(|_| rank != self.rank().index()) {
                None => copy_rows(stream, from, to, [rows, width])?,
                Some(other) => (0..rows).try_for_each(|row| {
                    let (from, to) = (from.at_row(row).start, to.at_row(row).start);
                    // SAFETY: each rank vouches for its rows during the meeting, and the contexts are alive.
                    let copied =
                        unsafe { sys::cuMemcpyPeerAsync(to.0, self.own.0, from.0, other.0, width, stream.raw()) };
                    CudaDevice::said("cuMemcpyPeerAsync", copied)
                })?,
            }
        }
        stream.wait()
    }
}

/// The context of a device, current on this thread afterwards.
fn context(device: &Arc<CudaDevice>) -> Result<Context, DeviceError> {
    device.enter()?;
    let mut current = std::ptr::null_mut();
    // SAFETY: the place is writable.
    CudaDevice::said("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
    Ok(Context(current))
}
