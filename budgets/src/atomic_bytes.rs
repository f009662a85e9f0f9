//! A byte count shared by several threads.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::Bytes;

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

    /// Adds, and returns the previous value.
    pub(crate) fn fetch_add(&self, bytes: Bytes) -> Bytes {
        Bytes(self.0.fetch_add(bytes.0, SeqCst))
    }

    /// Subtracts, and returns the previous value. The caller must check that the previous value was
    /// large enough, because the count wraps below 0.
    pub(crate) fn fetch_sub(&self, bytes: Bytes) -> Bytes {
        Bytes(self.0.fetch_sub(bytes.0, SeqCst))
    }
}
