//! A device's context and a stream in it. Each is released on drop, even if a later step of opening fails.

use cudarc::driver::sys;

use super::driver::{self, check};
use crate::DeviceError;

/// The retained primary context of a device. A process has only one, which all users share.
pub(super) struct Context {
    context: sys::CUcontext,
    device: sys::CUdevice,
}

/// A stream that does not wait for other streams.
pub(super) struct Stream {
    stream: sys::CUstream,
    /// Kept alive by the stream's owner.
    context: sys::CUcontext,
}

// SAFETY: a context may be made current on any thread, and is before each call that needs it.
unsafe impl Send for Context {}
// SAFETY: as above; the driver takes its own locks.
unsafe impl Sync for Context {}
// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver takes its own locks.
unsafe impl Sync for Stream {}

impl Context {
    pub(super) fn retain(device: sys::CUdevice) -> Result<Context, DeviceError> {
        let retain = |out| unsafe { sys::cuDevicePrimaryCtxRetain(out, device) };
        let context = driver::value("cuDevicePrimaryCtxRetain", retain)?;
        Ok(Context { context, device })
    }

    /// Makes it the calling thread's context.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        enter(self.context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and this is its last use.
        drop(check("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) }));
    }
}

impl Stream {
    /// A stream in this context, which must outlive the stream.
    pub(super) fn new(context: &Context) -> Result<Stream, DeviceError> {
        context.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let stream = driver::value("cuStreamCreate", |out| unsafe { sys::cuStreamCreate(out, flags) })?;
        Ok(Stream { stream, context: context.context })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits until all that was given to it is done.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is ours.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A lost context takes its streams with it.
        if enter(self.context).is_ok() {
            // SAFETY: the stream is ours, and this is its last use.
            drop(check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.stream) }));
        }
    }
}

fn enter(context: sys::CUcontext) -> Result<(), DeviceError> {
    // SAFETY: the caller keeps the context retained.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
}
