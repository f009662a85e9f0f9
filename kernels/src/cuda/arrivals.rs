//! Bytes on their way to the host, each behind a mark in the stream: the host waits for one without stopping what was
//! launched behind it.

use std::sync::{Arc, Mutex, PoisonError};

use bursar_budgets::{Bytes, CudaDevice, DeviceError, Pinned};
use cudarc::driver::sys;

use super::stream::{Event, Stream};
use crate::{KernelError, Tensor, ops::transfer::Arrival};

/// Places that are free: page-locked memory with a mark. A lane has two steps under way, so a few are all there ever are;
/// the stress before READY makes them as large as serving wants them.
#[derive(Clone)]
pub(super) struct Arrivals(Arc<Mutex<Vec<Place>>>);

struct Place {
    memory: Pinned,
    come: Event,
}

/// The shortest place: most of what comes is a few tokens.
const SHORTEST: Bytes = Bytes::kib(64);

/// One copy under way.
pub(super) struct Coming {
    place: Option<Place>,
    bytes: usize,
    free: Arrivals,
}

impl Coming {
    pub(super) fn begin(
        free: &Arrivals,
        device: &Arc<CudaDevice>,
        stream: &Stream,
        source: &Tensor<'_>,
    ) -> Result<Self, DeviceError> {
        let bytes = source.bytes().as_usize();
        let place = free.take(bytes, device)?;
        if bytes > 0 {
            // SAFETY: the place is as long and nobody else's; the tensor's maker vouches for the source.
            let copied = unsafe {
                sys::cuMemcpyDtoHAsync_v2(place.memory.address().cast(), source.address().0, bytes, stream.raw())
            };
            CudaDevice::said("cuMemcpyDtoHAsync", copied)?;
        }
        place.come.record(stream)?;
        Ok(Coming { place: Some(place), bytes, free: free.clone() })
    }
}

impl Arrivals {
    /// Two short places from the start, one for each step under way: the long one that the stress makes is then free for
    /// what needs it.
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let place = |_| Ok(Place { memory: device.pinned(SHORTEST)?, come: Event::new(device)? });
        Ok(Arrivals(Arc::new(Mutex::new((0..2).map(place).collect::<Result<_, DeviceError>>()?))))
    }

    /// The shortest free place that is long enough, or a new one.
    fn take(&self, bytes: usize, device: &Arc<CudaDevice>) -> Result<Place, DeviceError> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().enumerate().filter(|(_, place)| place.memory.len() >= bytes);
        if let Some((index, _)) = fits.min_by_key(|(_, place)| place.memory.len()) {
            return Ok(free.swap_remove(index));
        }
        drop(free);
        let bytes = Bytes((bytes as u64).next_power_of_two()).max(SHORTEST);
        Ok(Place { memory: device.pinned(bytes)?, come: Event::new(device)? })
    }
}

impl Arrival for Coming {
    fn has_come(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.come.is_past())
    }

    fn wait(self: Box<Self>, out: &mut [u8]) -> Result<(), KernelError> {
        let place = self.place.as_ref().expect("it is there until it drops");
        assert_eq!(out.len(), self.bytes, "as many bytes as are coming");
        place.come.wait()?;
        // SAFETY: the copy is done, and the place is as long.
        unsafe { std::ptr::copy_nonoverlapping(place.memory.address(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }
}

impl Drop for Coming {
    /// The place may be used again at once: what comes next comes through the same stream, behind this.
    fn drop(&mut self) {
        let mut free = self.free.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(self.place.take());
    }
}
