//! A model's demand for KV cache memory, written by its scheduler and read by the budget without
//! waiting.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// A model's current demand for KV cache memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KvDemand {
    /// The model has no requests.
    Idle,
    /// The model has requests, and its KV cache has enough free blocks for them.
    Busy,
    /// The model has requests that wait for KV cache blocks.
    WaitingForBlocks,
}

impl KvDemand {
    pub(super) const ALL: [KvDemand; 3] = [KvDemand::Idle, KvDemand::Busy, KvDemand::WaitingForBlocks];
}

/// A model's demand, written by its scheduler and read by the budget.
pub struct SharedKvDemand {
    need: AtomicU8,
    on_rise: Box<dyn Fn() + Send + Sync>,
}

impl SharedKvDemand {
    /// Creates a demand of [`KvDemand::Idle`]. `on_rise` is called after each rise of the demand,
    /// and must not block.
    pub(super) fn new(on_rise: impl Fn() + Send + Sync + 'static) -> Self {
        SharedKvDemand { need: AtomicU8::new(KvDemand::Idle as u8), on_rise: Box::new(on_rise) }
    }

    pub fn need(&self) -> KvDemand {
        KvDemand::ALL[usize::from(self.need.load(Relaxed))]
    }

    /// Sets the demand, and notifies the budget if the demand has risen.
    pub fn set(&self, need: KvDemand) {
        if self.need.swap(need as u8, Relaxed) < need as u8 {
            (self.on_rise)();
        }
    }
}

/// Prints only the demand.
impl std::fmt::Debug for SharedKvDemand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.need().fmt(formatter)
    }
}
