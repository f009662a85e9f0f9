//! A device's context and the streams in it. The context and each stream are released on drop, even
//! if a later step of opening the device fails.

use cudarc::driver::sys;

use super::driver::{self, check};
use crate::DeviceError;

/// The retained primary context of a device. A process has only one primary context per device,
/// which all code in the process shares.
pub(super) struct Context {
    context: sys::CUcontext,
    device: sys::CUdevice,
}

/// A stream that does not wait for other streams.
pub(super) struct Stream {
    stream: sys::CUstream,
    /// The context of the stream. The owner of the stream keeps the context alive.
    context: sys::CUcontext,
}

// SAFETY: a context may be made current on any thread, and each call that needs the context is
// preceded by `enter` on the same thread.
unsafe impl Send for Context {}
// SAFETY: the driver's functions are thread-safe, so threads may share a context.
unsafe impl Sync for Context {}
// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver's functions are thread-safe, so threads may share a stream.
unsafe impl Sync for Stream {}

impl Context {
    pub(super) fn retain(device: sys::CUdevice) -> Result<Context, DeviceError> {
        let retain = |out| unsafe { sys::cuDevicePrimaryCtxRetain(out, device) };
        let context = driver::value("cuDevicePrimaryCtxRetain", retain)?;
        Ok(Context { context, device })
    }

    /// Makes the context current on the calling thread.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        enter(self.context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once, and this is its last use.
        drop(check("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) }));
    }
}

impl Stream {
    /// Creates a stream in this context, which must outlive the stream.
    pub(super) fn new(context: &Context) -> Result<Stream, DeviceError> {
        context.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let stream = driver::value("cuStreamCreate", |out| unsafe { sys::cuStreamCreate(out, flags) })?;
        Ok(Stream { stream, context: context.context })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits until all work in the stream is done.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream belongs to this value and is valid.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // If the context is lost, its streams are gone with it.
        if enter(self.context).is_ok() {
            // SAFETY: the stream belongs to this value, and this is its last use.
            drop(check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.stream) }));
        }
    }
}

fn enter(context: sys::CUcontext) -> Result<(), DeviceError> {
    // SAFETY: the caller keeps the context retained.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
}
