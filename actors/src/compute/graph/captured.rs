//! How many sizes of decode steps are captured.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How many sizes a model's step lane has captured. 0 from the lane's death until its successor has captured again.
#[derive(Debug, Default)]
pub struct Captured(AtomicUsize);

impl Captured {
    /// The number of sizes captured.
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
