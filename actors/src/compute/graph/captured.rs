//! The number of captured decode step sizes.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The number of sizes that a model's step lane has captured. 0 from the death of the lane until
/// its successor has captured again.
#[derive(Debug, Default)]
pub struct Captured(AtomicUsize);

impl Captured {
    pub fn count(&self) -> usize {
        self.0.load(Relaxed)
    }

    pub(crate) fn none(&self) {
        self.0.store(0, Relaxed);
    }

    pub(crate) fn one_more(&self) {
        self.0.fetch_add(1, Relaxed);
    }
}
