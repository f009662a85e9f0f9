//! CUDA graphs: launches that are captured once and replayed as a unit. A captured decode step
//! takes one host call instead of about three hundred.

use std::{ptr, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, DeviceError, Overhead};
use cudarc::driver::sys;

use super::{kernels::CudaKernels, lane::Cuda, nccl::Watch, rank_link::RankLink, stream::Stream};
use crate::{Graph, KernelError};

/// A graph that can run in the stream that it was captured in.
pub(super) struct Captured {
    ready: Ready,
    bytes: Bytes,
    stream: Arc<Overhead<Stream>>,
    /// `Some` if the ranks are linked through NCCL: the link's watch, and the number of collectives
    /// that each replay launches.
    exchanges: Option<(Watch, u64)>,
    /// Keeps the modules of the captured kernels loaded.
    kernels: Arc<CudaKernels>,
}

impl Captured {
    /// Captures the launches of `run`. This function also instantiates and uploads the graph, so
    /// that a replay allocates nothing.
    pub(super) fn of(cuda: &Cuda, run: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Captured, KernelError> {
        cuda.enter()?;
        let (stream, kernels) = (&cuda.stream, &cuda.kernels);
        let capture = Capture::begin(cuda)?;
        let before = cuda.captured_exchanges();
        let outcome = run();
        // If both fail, the error of `run` is more informative than the error
        // of ending the capture.
        let recorded = capture.end();
        outcome?;
        let recorded = recorded?;
        let count = cuda.captured_exchanges() - before;
        let exchanges = match &cuda.link {
            Some(RankLink::Nccl(link)) => Some((link.watch().clone(), count)),
            _ => None,
        };
        let (made, bytes) = kernels.device.taken_by(|| {
            let ready = Ready::from(&recorded, &kernels.device)?;
            let there = ready.upload(stream);
            Ok::<_, DeviceError>((ready, there))
        })?;
        // Dropping a failed graph takes the device's measurement lock (`in_turn`) itself, so the
        // drop must happen outside the measurement.
        let (ready, there) = made?;
        there?;
        Ok(Captured { ready, bytes, stream: stream.clone(), exchanges, kernels: kernels.clone() })
    }
}

impl Cuda {
    /// Returns the number of NCCL collectives that were captured so far.
    fn captured_exchanges(&self) -> u64 {
        match &self.link {
            Some(RankLink::Nccl(link)) => link.captured(),
            _ => 0,
        }
    }
}

impl Graph for Captured {
    fn replay(&self) -> Result<(), KernelError> {
        self.kernels.device.enter()?;
        let launch = || {
            // SAFETY: the graph and the stream are alive, and the caller that captured the graph
            // guarantees that the memory used by its launches is valid.
            let launched = unsafe { sys::cuGraphLaunch(self.ready.raw, self.stream.raw()) };
            Ok(CudaDevice::check("cuGraphLaunch", launched)?)
        };
        match &self.exchanges {
            Some((watch, count)) => watch.launch(*count, launch),
            None => launch(),
        }
    }

    fn bytes(&self) -> Bytes {
        self.bytes
    }
}

/// A stream that records instead of executing. Dropping a `Capture` always makes
/// the stream execute again.
struct Capture<'c>(&'c Cuda);

impl<'c> Capture<'c> {
    fn begin(cuda: &'c Cuda) -> Result<Self, DeviceError> {
        // During the capture, other lanes may make any driver call. Only forbidden calls
        // on this thread fail.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the borrowed backend keeps the stream alive.
        CudaDevice::check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(cuda.stream.raw(), mode) })?;
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
    /// Discards the recorded launches after a panic or an error.
    fn drop(&mut self) {
        self.0.captures.set(false);
        drop(end(&self.0.stream));
    }
}

fn end(stream: &Stream) -> Result<Recorded, DeviceError> {
    let mut raw = ptr::null_mut();
    // SAFETY: the stream is recording, and `raw` is writable.
    let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &mut raw) };
    let recorded = Recorded(raw);
    CudaDevice::check("cuStreamEndCapture", ended)?;
    Ok(recorded)
}

/// A recorded graph; null if recording failed.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: this is the last use of the recorded graph, and the instantiated graph
            // does not need it.
            drop(CudaDevice::check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(self.0) }));
        }
    }
}

struct Ready {
    raw: sys::CUgraphExec,
    device: Arc<CudaDevice>,
}

// SAFETY: any thread that has entered the context may use the graph, one thread at a time.
unsafe impl Send for Ready {}

impl Ready {
    fn from(recorded: &Recorded, device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the recorded graph is alive, and `raw` is writable.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, recorded.0, 0) };
        CudaDevice::check("cuGraphInstantiate", made)?;
        Ok(Ready { raw, device: device.clone() })
    }

    /// Uploads the graph to the device and waits for the upload.
    fn upload(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the borrows keep the graph and the stream alive.
        CudaDevice::check("cuGraphUpload", unsafe { sys::cuGraphUpload(self.raw, stream.raw()) })?;
        stream.wait()
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: this is the last use of the graph. The driver keeps the graph until
            // pending replays are done.
            let destroyed = self.device.in_turn(|| unsafe { sys::cuGraphExecDestroy(self.raw) });
            drop(CudaDevice::check("cuGraphExecDestroy", destroyed));
        }
    }
}
