//! Page-locked host memory: what the device copies from and to by itself, beside whatever the host does.

use std::{fmt, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use super::{CudaDevice, driver::check};
use crate::{Bytes, DeviceError};

/// Page-locked host memory, the same for every context of the process. It is freed when it drops: whoever gave its
/// address to the device keeps it until the device is past that.
///
/// The memory is not initialised. It is of the host and of no lease: an engine takes a fixed amount at its start.
pub struct Pinned {
    address: NonNull<u8>,
    len: usize,
    device: Arc<CudaDevice>,
}

// SAFETY: it is memory, reached through its address alone, and whoever does that says that it is alone there.
unsafe impl Send for Pinned {}
// SAFETY: as above: nothing here reads or writes it.
unsafe impl Sync for Pinned {}

impl CudaDevice {
    /// Takes so many bytes of page-locked host memory, which start on a page of the host. It takes some milliseconds a
    /// hundred MiB, and is counted in [`super::CudaCounts`].
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] when the host has no such memory, or nothing is asked for; [`DeviceError::Lost`].
    pub fn pinned(self: &Arc<Self>, bytes: Bytes) -> Result<Pinned, DeviceError> {
        if bytes.is_zero() {
            return Err(DeviceError::HostRefused { asked: bytes, said: "nothing was asked for".to_owned() });
        }
        self.enter()?;
        self.count_allocation();
        let mut address = std::ptr::null_mut();
        let portable = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the address is there to write to.
        let taken = unsafe { sys::cuMemHostAlloc(&mut address, bytes.as_usize(), portable) };
        check("cuMemHostAlloc", taken).map_err(|error| refused_by_host(bytes, error))?;
        let address = NonNull::new(address.cast()).expect("what was given is somewhere");
        self.pinned.fetch_add(bytes);
        Ok(Pinned { address, len: bytes.as_usize(), device: self.clone() })
    }
}

/// The driver says out of memory for the host's memory as it does for its own.
fn refused_by_host(asked: Bytes, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Refused { .. } => DeviceError::HostRefused { asked, said: "the host is out of memory".to_owned() },
        DeviceError::Driver { said, .. } => DeviceError::HostRefused { asked, said },
        error => error,
    }
}

impl Pinned {
    /// Where it starts, on the host and for the device's copies alike.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "there is no pinned memory of nothing")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        drop(self.device.enter_if_there());
        // SAFETY: it was taken once, and whoever used it has said that this is the end.
        drop(check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.address.as_ptr().cast()) }));
        self.device.pinned.fetch_sub(Bytes(self.len as u64));
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} page-locked at {:p}", Bytes(self.len as u64), self.address)
    }
}
