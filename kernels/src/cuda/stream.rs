//! A lane's stream, and CUDA events.

use std::sync::Arc;

use bursar_budgets::{CudaDevice, DeviceError};
use cudarc::driver::sys;

/// An ordered stream of work. A stream waits for other streams, including the default stream, only
/// if an event [holds](Event::hold) it.
pub(super) struct Stream {
    raw: sys::CUstream,
    device: Arc<CudaDevice>,
}

// SAFETY: a stream may be used from any thread that has entered its context.
unsafe impl Send for Stream {}
// SAFETY: the driver orders the work that several threads submit to a stream.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        device.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a local variable, so the new handle may be written to it.
        CudaDevice::check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { raw, device: device.clone() })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until the stream has finished all its work.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.device.enter()?;
        // SAFETY: `self` owns the stream, which is destroyed only when `self` is dropped.
        CudaDevice::check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // Wait first, because unfinished work still uses memory that will be reused.
            drop(self.wait());
            // SAFETY: the stream is destroyed only here, and this is its last use.
            drop(CudaDevice::check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.raw) }));
        }
    }
}

/// A CUDA event, which marks a position in a stream.
pub(super) struct Event {
    raw: sys::CUevent,
    device: Arc<CudaDevice>,
}

// SAFETY: an event may be used from any thread that has entered its context.
unsafe impl Send for Event {}

impl Event {
    /// Creates an event that orders work and does not record its time.
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// Creates an event that also records its time.
    pub(super) fn timed(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with(device: &Arc<CudaDevice>, flags: u32) -> Result<Self, DeviceError> {
        device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a local variable, so the new handle may be written to it.
        CudaDevice::check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { raw, device: device.clone() })
    }

    /// Records the event after all work that was submitted to the stream so far.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the borrows keep the event and the stream alive.
        CudaDevice::check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Makes all work that is submitted to the stream from now on wait until the device
    /// has passed the event.
    pub(super) fn hold(&self, stream: &Stream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
        // SAFETY: the borrows keep the event and the stream alive.
        CudaDevice::check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.raw, self.raw, flags) })
    }

    /// Waits until the device has passed the event. Returns at once if the
    /// event was never recorded.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: `self` owns the event, which is destroyed only when `self` is dropped.
        CudaDevice::check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Returns `true` if the device has passed the event, if the event was never recorded, or if
    /// the device is lost. In the last case, `wait` returns the error.
    pub(super) fn is_past(&self) -> bool {
        // SAFETY: `self` owns the event, which is destroyed only when `self` is dropped.
        unsafe { sys::cuEventQuery(self.raw) != sys::CUresult::CUDA_ERROR_NOT_READY }
    }

    /// Returns the milliseconds from `before` to this event. Both events must be timed, and the
    /// device must have passed them.
    pub(super) fn milliseconds_since(&self, before: &Event) -> Result<f32, DeviceError> {
        let mut milliseconds = 0.0;
        // SAFETY: the number is writable, and both events are alive.
        let elapsed = unsafe { sys::cuEventElapsedTime(&mut milliseconds, before.raw, self.raw) };
        CudaDevice::check("cuEventElapsedTime", elapsed).map(|()| milliseconds)
    }
}

/// Two events that measure the time of the work between them.
pub(super) struct Clock {
    before: Event,
    behind: Event,
}

impl Clock {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Ok(Clock { before: Event::timed(device)?, behind: Event::timed(device)? })
    }

    /// Starts timing: work submitted to the stream from now on is timed.
    pub(super) fn begin(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.before.record(stream)
    }

    /// Stops timing: work submitted to the stream from now on is not timed.
    pub(super) fn end(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.behind.record(stream)
    }

    /// Returns `true` if the device has completed the timed work.
    pub(super) fn is_past(&self) -> bool {
        self.behind.is_past()
    }

    /// Waits for the timed work, and returns the milliseconds that the device took for it.
    pub(super) fn milliseconds(&self) -> Result<f32, DeviceError> {
        self.behind.wait()?;
        self.behind.milliseconds_since(&self.before)
    }

    /// Waits for the work that `run` submits to the stream, and returns the milliseconds that the
    /// device took for it.
    pub(super) fn time<E: From<DeviceError>>(
        &self,
        stream: &Stream,
        run: impl FnOnce() -> Result<(), E>,
    ) -> Result<f32, E> {
        self.begin(stream)?;
        run()?;
        self.end(stream)?;
        Ok(self.milliseconds()?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the event is destroyed only here, and this is its last use. The driver keeps
            // the event until pending work is done.
            drop(CudaDevice::check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.raw) }));
        }
    }
}
