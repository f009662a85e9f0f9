//! Page-locked host memory, which the device copies from and to without the host.

use std::{fmt, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use super::{CudaDevice, context::Stream, driver::check, large_pages::LargePages};
use crate::{Address, Bytes, DeviceError};

/// Page-locked host memory, valid in every context of the process. Dropping it frees it: an owner that has given its
/// address to the device must keep it until the device is past that.
///
/// The memory is uninitialised. It is host memory without a lease: an engine takes a fixed amount when it starts.
pub struct Pinned {
    address: NonNull<u8>,
    len: usize,
    /// Where it is the process's own and the driver only locked it.
    pages: Option<LargePages>,
    device: Arc<CudaDevice>,
}

/// From here on memory is the process's own, in large pages. On the host of an H200 8 GiB of it took 0.5 s to have and 0.2 s to
/// give back, the driver's own 5.5 s and 1.4 s.
const LARGE: Bytes = Bytes::mib(64);

// SAFETY: it is memory, reached only through its address. Code that does so must ensure exclusive access.
unsafe impl Send for Pinned {}
// SAFETY: as above: nothing here reads or writes it.
unsafe impl Sync for Pinned {}

impl CudaDevice {
    /// Takes this many bytes of page-locked host memory, page-aligned. It takes some milliseconds per 100 MiB, and
    /// [`super::CudaCounts`] counts it.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host has no such memory, or `bytes` is 0. [`DeviceError::Lost`].
    pub fn pinned(self: &Arc<Self>, bytes: Bytes) -> Result<Pinned, DeviceError> {
        if bytes.is_zero() {
            return Err(DeviceError::HostRefused { asked: bytes, said: "the request was for 0 bytes".to_owned() });
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

    /// Memory of the process, locked. None where the system has none or will not have it locked.
    fn lock_pages(&self, bytes: Bytes) -> Result<Option<LargePages>, DeviceError> {
        let Some(pages) = LargePages::take(bytes) else { return Ok(None) };
        let portable = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: it is memory of this length, which lives until it is unregistered.
        let locked = unsafe { sys::cuMemHostRegister_v2(pages.address().as_ptr().cast(), pages.len(), portable) };
        match check("cuMemHostRegister", locked) {
            Ok(()) => Ok(Some(pages)),
            Err(error) if error.is_lost() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Memory that the driver takes and locks.
    fn driver_memory(&self, bytes: Bytes) -> Result<NonNull<u8>, DeviceError> {
        let mut address = std::ptr::null_mut();
        let portable = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the output pointer is valid.
        let taken = unsafe { sys::cuMemHostAlloc(&mut address, bytes.as_usize(), portable) };
        check("cuMemHostAlloc", taken).map_err(|error| refused_by_host(bytes, error))?;
        Ok(NonNull::new(address.cast()).expect("what was given is somewhere"))
    }
}

impl CudaDevice {
    /// Copies what is backed here into page-locked memory, and waits for it.
    pub(super) fn copy_to_host(self: &Arc<Self>, address: Address, bytes: Bytes) -> Result<Pinned, DeviceError> {
        let copy = self.pinned(bytes)?;
        let stream = Stream::new(&self.context)?;
        // SAFETY: the copy is this long and ours alone. The driver refuses addresses that are not backed.
        let begun =
            unsafe { sys::cuMemcpyDtoHAsync_v2(copy.address().cast(), address.0, bytes.as_usize(), stream.raw()) };
        // Waited for even if it did not begin: the memory may go only then.
        let done = stream.wait();
        check("cuMemcpyDtoHAsync", begun).and(done)?;
        Ok(copy)
    }

    /// Copies `copy` to where as much is backed, and waits for it.
    pub(super) fn copy_from_host(&self, copy: &Pinned, address: Address) -> Result<(), DeviceError> {
        let stream = Stream::new(&self.context)?;
        // SAFETY: as above; the copy lives until the stream has been waited for.
        let begun = unsafe { sys::cuMemcpyHtoDAsync_v2(address.0, copy.address().cast(), copy.len(), stream.raw()) };
        let done = stream.wait();
        check("cuMemcpyHtoDAsync", begun).and(done)
    }
}

/// The driver reports out of memory for host memory as it does for its own.
fn refused_by_host(asked: Bytes, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Refused { .. } => DeviceError::HostRefused { asked, said: "the host is out of memory".to_owned() },
        DeviceError::Driver { said, .. } => DeviceError::HostRefused { asked, said },
        error => error,
    }
}

impl Pinned {
    /// Its address, both on the host and for the device's copies.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "there is no pinned memory of nothing")]
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
                // SAFETY: it was registered once, and by contract the device no longer uses it.
                let unlocked = check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(address) });
                // What the driver still takes for locked must not become other memory.
                if unlocked.is_err() {
                    std::mem::forget(pages);
                }
            }
            // SAFETY: it was taken once, and as above.
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
