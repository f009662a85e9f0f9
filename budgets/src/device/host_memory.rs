//! Host memory for copies to and from a device, held for as long as a model serves.

use std::mem::MaybeUninit;

use super::{DeviceError, Pinned};
use crate::Bytes;

/// Uninitialized host memory for copies to and from a device. An owner that has given the address
/// to the device must keep this memory until the device is past those copies.
#[derive(Debug)]
pub struct HostMemory(Kind);

#[derive(Debug)]
enum Kind {
    /// Page-locked memory, for copies to and from a GPU.
    Pinned(Pinned),
    /// Pages for copies to and from a host device. This is a raw pointer, because the memory is
    /// also written through other pointers.
    Pages(*mut [MaybeUninit<u8>]),
}

// SAFETY: the memory is not tied to a thread, and code that uses its address
// must ensure exclusive access.
unsafe impl Send for HostMemory {}
// SAFETY: no method reads or writes the memory, so shared references cannot race.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(super) fn pinned(pinned: Pinned) -> Self {
        HostMemory(Kind::Pinned(pinned))
    }

    /// Memory of the operating system, which backs each page when it is first written.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`].
    pub(super) fn pages(bytes: Bytes) -> Result<Self, DeviceError> {
        let mut pages: Vec<MaybeUninit<u8>> = Vec::new();
        let said = |error: std::collections::TryReserveError| error.to_string();
        let reserved = pages.try_reserve_exact(bytes.as_usize());
        reserved.map_err(|error| DeviceError::HostRefused { asked: bytes, said: said(error) })?;
        // SAFETY: the capacity was reserved above. `MaybeUninit` needs no initialization.
        unsafe { pages.set_len(bytes.as_usize()) };
        Ok(HostMemory(Kind::Pages(Box::into_raw(pages.into_boxed_slice()))))
    }

    pub fn address(&self) -> *mut u8 {
        match &self.0 {
            Kind::Pinned(pinned) => pinned.address(),
            Kind::Pages(pages) => pages.cast(),
        }
    }

    pub fn bytes(&self) -> Bytes {
        match &self.0 {
            Kind::Pinned(pinned) => Bytes(pinned.len() as u64),
            Kind::Pages(pages) => Bytes(pages.len() as u64),
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Kind::Pages(pages) = self.0 {
            // SAFETY: the pointer came from `Box::into_raw` and is freed only here.
            drop(unsafe { Box::from_raw(pages) });
        }
    }
}
