//! A number of bytes that several threads count.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::Bytes;

/// Bytes that are read and changed without a lock.
#[derive(Debug, Default)]
pub(crate) struct AtomicBytes(AtomicU64);

impl AtomicBytes {
    pub(crate) fn new(bytes: Bytes) -> AtomicBytes {
        AtomicBytes(AtomicU64::new(bytes.0))
    }

    pub(crate) fn load(&self) -> Bytes {
        Bytes(self.0.load(SeqCst))
    }

    pub(crate) fn store(&self, bytes: Bytes) {
        self.0.store(bytes.0, SeqCst);
    }

    /// Adds, and returns what it was before.
    pub(crate) fn fetch_add(&self, bytes: Bytes) -> Bytes {
        Bytes(self.0.fetch_add(bytes.0, SeqCst))
    }

    /// Subtracts, and returns what it was before. The caller checks that it was as much: below nothing it wraps.
    pub(crate) fn fetch_sub(&self, bytes: Bytes) -> Bytes {
        Bytes(self.0.fetch_sub(bytes.0, SeqCst))
    }
}
