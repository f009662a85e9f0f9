//! Page-locked host memory, for asynchronous copies to and from the device.

use std::{fmt, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use super::{context::Stream, driver::check, gpu::CudaDevice, large_pages::LargePages};
use crate::{Address, Bytes, DeviceError};

/// Page-locked host memory, valid in every context of the process. Dropping it frees the memory. An
/// owner that has given the address to the device must keep this value until the device has
/// finished all copies that use the address.
///
/// The memory is uninitialized. This type leases nothing. The host tier and the weights of
/// suspended models hold leases for their page-locked memory. The staging buffers of lanes hold
/// none.
pub struct Pinned {
    address: NonNull<u8>,
    len: usize,
    /// The memory, if the process allocated it and the driver only locked it. `None` if
    /// the driver allocated it.
    pages: Option<LargePages>,
    device: Arc<CudaDevice>,
}

/// The smallest size for which the process allocates the memory itself, in large pages. For 8 GiB
/// on the host of an H200, this took 0.5 s to allocate and 0.2 s to free. The driver's own
/// allocation took 5.5 s and 1.4 s.
const LARGE: Bytes = Bytes::mib(64);

// SAFETY: the memory is not tied to a thread, and code that uses its address
// must ensure exclusive access.
unsafe impl Send for Pinned {}
// SAFETY: no method reads or writes the memory, so shared references cannot race.
unsafe impl Sync for Pinned {}

impl CudaDevice {
    /// Allocates this many bytes of page-locked host memory, page-aligned. The call takes a few
    /// milliseconds per 100 MiB, or about 70 ms per 100 MiB if the driver has to allocate the
    /// memory. The call is counted in [`super::CudaCounts`].
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host cannot provide such memory, or `bytes` is 0.
    /// [`DeviceError::Lost`] if the device is lost.
    pub fn pinned(self: &Arc<Self>, bytes: Bytes) -> Result<Pinned, DeviceError> {
        if bytes.is_zero() {
            return Err(DeviceError::HostRefused { asked: bytes, message: "the request was for 0 bytes".to_owned() });
        }
        self.enter()?;
        self.count_allocation();
        let locked = if bytes >= LARGE { self.lock_pages(bytes)? } else { None };
        let (address, pages) = match locked {
            Some(pages) => (pages.address(), Some(pages)),
            None => (self.driver_memory(bytes)?, None),
        };
        self.pinned.fetch_add(bytes);
        Ok(Pinned { address, len: bytes.as_usize(), pages, device: self.clone() })
    }

    /// Locks memory that the process allocates. `None` if the system does not have enough memory or
    /// refuses to lock it.
    fn lock_pages(&self, bytes: Bytes) -> Result<Option<LargePages>, DeviceError> {
        let Some(pages) = LargePages::take(bytes) else { return Ok(None) };
        let portable = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the memory has this length, and lives until it is unregistered.
        let locked = unsafe { sys::cuMemHostRegister_v2(pages.address().as_ptr().cast(), pages.len(), portable) };
        match check("cuMemHostRegister", locked) {
            Ok(()) => Ok(Some(pages)),
            Err(error) if error.is_lost() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Memory that the driver allocates and locks.
    fn driver_memory(&self, bytes: Bytes) -> Result<NonNull<u8>, DeviceError> {
        let mut address = std::ptr::null_mut();
        let portable = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the output pointer is valid.
        let taken = unsafe { sys::cuMemHostAlloc(&mut address, bytes.as_usize(), portable) };
        check("cuMemHostAlloc", taken).map_err(|error| refused_by_host(bytes, error))?;
        Ok(NonNull::new(address.cast()).expect("allocated host memory is not at address zero"))
    }
}

impl CudaDevice {
    /// Copies backed memory of the device into page-locked memory, and waits for the copy.
    pub(super) fn copy_to_host(self: &Arc<Self>, address: Address, bytes: Bytes) -> Result<Pinned, DeviceError> {
        let copy = self.pinned(bytes)?;
        let stream = Stream::new(&self.context)?;
        // SAFETY: the copy is this long, and no other code uses it. The driver refuses addresses
        // that are not backed.
        let begun =
            unsafe { sys::cuMemcpyDtoHAsync_v2(copy.address().cast(), address.0, bytes.as_usize(), stream.raw()) };
        // Wait even if the copy failed to start, because the memory may be freed only after the
        // wait.
        let done = stream.wait();
        check("cuMemcpyDtoHAsync", begun).and(done)?;
        Ok(copy)
    }

    /// Copies `copy` to `address` and waits for the copy. The device must have backed all bytes
    /// from `address` to the end of the copy.
    pub(super) fn copy_from_host(&self, copy: &Pinned, address: Address) -> Result<(), DeviceError> {
        let stream = Stream::new(&self.context)?;
        // SAFETY: `copy` lives until the stream has been waited for. The driver refuses addresses
        // that are not backed.
        let begun = unsafe { sys::cuMemcpyHtoDAsync_v2(address.0, copy.address().cast(), copy.len(), stream.raw()) };
        let done = stream.wait();
        check("cuMemcpyHtoDAsync", begun).and(done)
    }
}

/// Converts the driver's error: for host memory, the driver reports the same out-of-memory error
/// as for device memory.
fn refused_by_host(asked: Bytes, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Refused { .. } => {
            DeviceError::HostRefused { asked, message: "the host is out of memory".to_owned() }
        }
        DeviceError::Driver { message, .. } => DeviceError::HostRefused { asked, message },
        error => error,
    }
}

impl Pinned {
    /// The address, valid both on the host and for the device's copies.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Length of the pinned memory in bytes.
    #[expect(clippy::len_without_is_empty, reason = "the length is never 0")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        drop(self.device.enter_if_there());
        let address = self.address.as_ptr().cast();
        match self.pages.take() {
            Some(pages) => {
                // SAFETY: the memory was registered once, and by contract the device
                // no longer uses it.
                let unlocked = check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(address) });
                // Memory that the driver still considers locked must not be reused,
                // so it is leaked.
                if unlocked.is_err() {
                    std::mem::forget(pages);
                }
            }
            // SAFETY: the driver allocated the memory, which is freed only here, and by contract
            // the device no longer uses it.
            None => drop(check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(address) })),
        }
        self.device.pinned.fetch_sub(Bytes(self.len as u64));
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} page-locked at {:p}", Bytes(self.len as u64), self.address)
    }
}
