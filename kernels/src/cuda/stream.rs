//! A lane's stream, and marks in it.

use std::sync::Arc;

use bursar_budgets::{CudaDevice, DeviceError};
use cudarc::driver::sys;

/// An ordered stream of work. It waits for no other stream.
pub(super) struct Stream {
    raw: sys::CUstream,
    device: Arc<CudaDevice>,
}

// SAFETY: a stream may be used from any thread that has entered its context.
unsafe impl Send for Stream {}
// SAFETY: likewise; the driver orders what several threads put into it.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        device.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is there to write to.
        CudaDevice::said("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { raw, device: device.clone() })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Returns when all that was put into it is done.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.device.enter()?;
        // SAFETY: the stream lives.
        CudaDevice::said("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // What is under way still uses memory that others will be given.
            drop(self.wait());
            // SAFETY: it was made once, and this is its last use.
            drop(CudaDevice::said("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.raw) }));
        }
    }
}

/// A mark in a stream.
pub(super) struct Event {
    raw: sys::CUevent,
    device: Arc<CudaDevice>,
}

// SAFETY: as a stream.
unsafe impl Send for Event {}

impl Event {
    /// A mark that only orders.
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// A mark that knows its time.
    pub(super) fn timed(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with(device: &Arc<CudaDevice>, flags: u32) -> Result<Self, DeviceError> {
        device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the event is there to write to.
        CudaDevice::said("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { raw, device: device.clone() })
    }

    /// Puts the mark behind all that the stream has been given.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both live.
        CudaDevice::said("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Returns when the device is past it; at once if it was never recorded.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: it lives.
        CudaDevice::said("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Whether the device is past it. A device that is lost is past everything: whoever waits hears of that.
    pub(super) fn is_past(&self) -> bool {
        // SAFETY: it lives.
        unsafe { sys::cuEventQuery(self.raw) != sys::CUresult::CUDA_ERROR_NOT_READY }
    }

    /// Milliseconds from `before` to this; both are timed and passed.
    pub(super) fn milliseconds_since(&self, before: &Event) -> Result<f32, DeviceError> {
        let mut milliseconds = 0.0;
        // SAFETY: the number is there to write to, and both live.
        let elapsed = unsafe { sys::cuEventElapsedTime(&mut milliseconds, before.raw, self.raw) };
        CudaDevice::said("cuEventElapsedTime", elapsed).map(|()| milliseconds)
    }
}

/// Two marks that measure what lies between them.
pub(super) struct Clock {
    before: Event,
    behind: Event,
}

impl Clock {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Ok(Clock { before: Event::timed(device)?, behind: Event::timed(device)? })
    }

    /// Milliseconds that the device takes for what `run` puts into the stream, which it then is past.
    pub(super) fn time<E: From<DeviceError>>(
        &self,
        stream: &Stream,
        run: impl FnOnce() -> Result<(), E>,
    ) -> Result<f32, E> {
        self.before.record(stream)?;
        run()?;
        self.behind.record(stream)?;
        self.behind.wait()?;
        Ok(self.behind.milliseconds_since(&self.before)?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: it was made once, and this is its last use; the driver keeps what is under way.
            drop(CudaDevice::said("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.raw) }));
        }
    }
}
