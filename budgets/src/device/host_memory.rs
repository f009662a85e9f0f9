//! Host memory for copies to and from a device, held for as long as a model serves.

use std::{any::Any, fmt, mem::MaybeUninit};

use super::error::DeviceError;
use crate::Bytes;

/// Uninitialized host memory for copies to and from a device. An owner that has given the address
/// to the device must keep this memory until the device has finished all copies that use the
/// address.
pub struct HostMemory {
    address: *mut u8,
    bytes: Bytes,
    /// Frees the memory when it is dropped.
    _owner: Box<dyn Any + Send + Sync>,
}

/// Pages that the operating system allocated. The field is a raw pointer, because other code writes
/// to the memory through its own pointers.
struct SystemPages(*mut [MaybeUninit<u8>]);

// SAFETY: the memory is not tied to a thread, and code that uses its address
// must ensure exclusive access.
unsafe impl Send for HostMemory {}
// SAFETY: no method reads or writes the memory, so shared references cannot race.
unsafe impl Sync for HostMemory {}
// SAFETY: the memory is not tied to a thread, and this type only frees it.
unsafe impl Send for SystemPages {}
// SAFETY: no method reads or writes the memory, so shared references cannot race.
unsafe impl Sync for SystemPages {}

impl HostMemory {
    /// Memory that `owner` frees when it is dropped.
    pub(super) fn of(address: *mut u8, bytes: Bytes, owner: impl Any + Send + Sync) -> Self {
        HostMemory { address, bytes, _owner: Box::new(owner) }
    }

    /// Allocates memory from the operating system, which backs each page at the first write to the
    /// page.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`].
    pub(super) fn pages(bytes: Bytes) -> Result<Self, DeviceError> {
        let mut pages: Vec<MaybeUninit<u8>> = Vec::new();
        let message_of = |error: std::collections::TryReserveError| error.to_string();
        let reserved = pages.try_reserve_exact(bytes.as_usize());
        reserved.map_err(|error| DeviceError::HostRefused { asked: bytes, message: message_of(error) })?;
        // SAFETY: the capacity was reserved above. `MaybeUninit` needs no initialization.
        unsafe { pages.set_len(bytes.as_usize()) };
        let pages = Box::into_raw(pages.into_boxed_slice());
        Ok(HostMemory::of(pages.cast(), bytes, SystemPages(pages)))
    }

    pub fn address(&self) -> *mut u8 {
        self.address
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes
    }
}

impl Drop for SystemPages {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and is freed only here.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of host memory at {:p}", self.bytes, self.address)
    }
}
