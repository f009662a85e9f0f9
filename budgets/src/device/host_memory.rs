//! Host memory that a device copies from and to for as long as a model serves.

use std::mem::MaybeUninit;

use super::{DeviceError, Pinned};
use crate::Bytes;

/// Host memory for a device's copies, uninitialised. An owner that has given its address to the device must keep it until
/// the device is past that.
#[derive(Debug)]
pub struct HostMemory(Kind);

#[derive(Debug)]
enum Kind {
    /// For a GPU.
    Pinned(Pinned),
    /// For host memory that stands in for one. A pointer, because it is written through others too.
    Pages(*mut [MaybeUninit<u8>]),
}

// SAFETY: it is memory, reached only through its address. Code that does so must ensure exclusive access.
unsafe impl Send for HostMemory {}
// SAFETY: as above: nothing here reads or writes it.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(super) fn pinned(pinned: Pinned) -> Self {
        HostMemory(Kind::Pinned(pinned))
    }

    /// Memory of the system, which backs its pages when they are first written.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`].
    pub(super) fn pages(bytes: Bytes) -> Result<Self, DeviceError> {
        let mut pages: Vec<MaybeUninit<u8>> = Vec::new();
        let said = |error: std::collections::TryReserveError| error.to_string();
        let reserved = pages.try_reserve_exact(bytes.as_usize());
        reserved.map_err(|error| DeviceError::HostRefused { asked: bytes, said: said(error) })?;
        // SAFETY: that much was reserved, and nothing of it has to be initialised.
        unsafe { pages.set_len(bytes.as_usize()) };
        Ok(HostMemory(Kind::Pages(Box::into_raw(pages.into_boxed_slice()))))
    }

    /// Its address.
    pub fn address(&self) -> *mut u8 {
        match &self.0 {
            Kind::Pinned(pinned) => pinned.address(),
            Kind::Pages(pages) => pages.cast(),
        }
    }

    /// Its length.
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
            // SAFETY: it came from a box, and is given back once.
            drop(unsafe { Box::from_raw(pages) });
        }
    }
}
