//! Launches captured once and run again in one go: the host's share of a decode step is then one call instead of some
//! three hundred.

use std::{ptr, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::{Cuda, CudaKernels, stream::Stream};
use crate::{Graph, KernelError};

/// A graph that is ready to run in the stream that it was captured in.
pub(super) struct Captured {
    ready: Ready,
    bytes: Bytes,
    stream: Arc<Stream>,
    /// Its launches are of these modules.
    kernels: Arc<CudaKernels>,
}

impl Captured {
    /// Captures what `run` launches. It is instantiated and brought to the device here, so that a replay asks for nothing.
    pub(super) fn of(cuda: &Cuda, run: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Captured, KernelError> {
        cuda.enter()?;
        let (stream, kernels) = (&cuda.stream, &cuda.kernels);
        let capture = Capture::begin(cuda)?;
        let outcome = run();
        // The end of a capture that went wrong says only that it did; what went wrong says more.
        let recorded = capture.end();
        outcome?;
        let recorded = recorded?;
        let (ready, bytes) = kernels.device.taken_by(|| Ready::from(&recorded, stream, &kernels.device))?;
        Ok(Captured { ready: ready?, bytes, stream: stream.clone(), kernels: kernels.clone() })
    }
}

impl Graph for Captured {
    fn replay(&self) -> Result<(), KernelError> {
        self.kernels.device.enter()?;
        // SAFETY: both live, and whoever captured vouches for the memory that the launches name.
        let launched = unsafe { sys::cuGraphLaunch(self.ready.raw, self.stream.raw()) };
        Ok(CudaDevice::said("cuGraphLaunch", launched)?)
    }

    fn bytes(&self) -> Bytes {
        self.bytes
    }
}

/// A stream that records instead of running. However this ends, the stream runs again.
struct Capture<'c>(&'c Cuda);

impl<'c> Capture<'c> {
    fn begin(cuda: &'c Cuda) -> Result<Self, DeviceError> {
        // Other lanes may call the driver as they like meanwhile; what this thread must not call fails.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        CudaDevice::said("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(cuda.stream.raw(), mode) })?;
        cuda.captures.set(true);
        Ok(Capture(cuda))
    }

    fn end(self) -> Result<Recorded, DeviceError> {
        let cuda = self.0;
        std::mem::forget(self);
        cuda.captures.set(false);
        end(&cuda.stream)
    }
}

impl Drop for Capture<'_> {
    /// What was recorded before a panic is nothing.
    fn drop(&mut self) {
        self.0.captures.set(false);
        drop(end(&self.0.stream));
    }
}

fn end(stream: &Stream) -> Result<Recorded, DeviceError> {
    let mut raw = ptr::null_mut();
    // SAFETY: the stream records, and the graph is there to write to.
    let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &mut raw) };
    let recorded = Recorded(raw);
    CudaDevice::said("cuStreamEndCapture", ended)?;
    Ok(recorded)
}

/// What was recorded; none where that went wrong.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it was made once, and what was instantiated from it does not need it.
            drop(CudaDevice::said("cuGraphDestroy", unsafe { sys::cuGraphDestroy(self.0) }));
        }
    }
}

/// What the device runs.
struct Ready {
    raw: sys::CUgraphExec,
    device: Arc<CudaDevice>,
}

// SAFETY: it may be used from any thread that has entered its context, by one at a time.
unsafe impl Send for Ready {}

impl Ready {
    fn from(recorded: &Recorded, stream: &Stream, device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the recorded graph lives, and this one is there to write to.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, recorded.0, 0) };
        CudaDevice::said("cuGraphInstantiate", made)?;
        let ready = Ready { raw, device: device.clone() };
        // SAFETY: both live.
        CudaDevice::said("cuGraphUpload", unsafe { sys::cuGraphUpload(raw, stream.raw()) })?;
        stream.wait()?;
        Ok(ready)
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: it was made once, and this is its last use; the driver keeps what is under way.
            drop(CudaDevice::said("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.raw) }));
        }
    }
}
