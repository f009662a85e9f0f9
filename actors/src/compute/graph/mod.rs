//! Captured CUDA graphs of decode steps: their number, sizes and the layout of their inputs. The
//! lane that captured the graphs replays them (`lane/decoding.rs`). The lease that pays for the
//! graphs is kept in [`GraphInputs`](super::memory::GraphInputs).

mod shape;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub use shape::{GraphKey, GraphLimits, StepKind, buckets};

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
