//! Values that take memory on a GPU outside leases.

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use super::gpu::CudaDevice;
use crate::DeviceError;

/// A value that takes GPU memory outside leases. The memory is counted as overhead while the value
/// exists.
///
/// Dropping an `Overhead` waits for other measurements. The work passed to
/// [`CudaDevice::with_overhead`] or [`CudaDevice::taken_by`] must therefore not drop an `Overhead`.
pub struct Overhead<T> {
    thing: ManuallyDrop<T>,
    source: &'static str,
    device: Arc<CudaDevice>,
}

impl<T> Overhead<T> {
    fn of(thing: T, source: &'static str, device: &Arc<CudaDevice>) -> Self {
        Overhead { thing: ManuallyDrop::new(thing), source, device: device.clone() }
    }
}

impl<T> Deref for Overhead<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.thing
    }
}

impl<T> DerefMut for Overhead<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.thing
    }
}

impl<T> Drop for Overhead<T> {
    fn drop(&mut self) {
        let Overhead { thing, source, device } = self;
        // SAFETY: this runs once, in `drop`, and the value is not used afterward.
        device.meter.count_off(source, || device.left(), || unsafe { ManuallyDrop::drop(thing) });
    }
}

impl<T: fmt::Debug> fmt::Debug for Overhead<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Overhead").field(&**self).finish()
    }
}

impl CudaDevice {
    /// Creates a value that takes memory which no lease can cover (loaded modules, library handles,
    /// streams). The memory is counted as overhead of `source` until the value is dropped. A ledger
    /// that reads [`Device::overhead`](crate::Device::overhead) before each grant then accounts for
    /// the memory. If the driver does not distinguish processes, memory that other processes take
    /// during the call is counted too. Only one thread measures at a time.
    ///
    /// # Errors
    /// Any error of `make`, or of the query for free memory. Memory that the driver keeps after a
    /// failed attempt stays counted.
    pub fn with_overhead<T, E: From<DeviceError>>(
        self: &Arc<Self>,
        source: &'static str,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Overhead<T>, E> {
        self.count_allocation();
        Ok(Overhead::of(self.meter.count(source, || self.left(), make)??, source, self))
    }
}
