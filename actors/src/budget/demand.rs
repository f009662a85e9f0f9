//! How much a model needs its keys and values, as its scheduler tells the budget without waiting for it.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::Budget;

/// How much a model needs its keys and values now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KvDemand {
    /// It has no request.
    Idle,
    /// It has requests, and room for them.
    Busy,
    /// It has requests that wait for blocks.
    WaitingForBlocks,
}

impl KvDemand {
    pub(super) const ALL: [KvDemand; 3] = [KvDemand::Idle, KvDemand::Busy, KvDemand::WaitingForBlocks];
}

/// A model's need, written by its scheduler and read by the budget.
pub struct SharedKvDemand {
    need: AtomicU8,
    budget: Budget,
}

impl SharedKvDemand {
    /// No need yet. `budget` hears of changes that it can do something about.
    pub fn new(budget: Budget) -> Self {
        SharedKvDemand { need: AtomicU8::new(KvDemand::Idle as u8), budget }
    }

    /// The need now.
    pub fn need(&self) -> KvDemand {
        KvDemand::ALL[usize::from(self.need.load(Relaxed))]
    }

    /// Sets the need.
    pub fn set(&self, need: KvDemand) {
        if self.need.swap(need as u8, Relaxed) < need as u8 {
            self.budget.hears_of_need();
        }
    }
}

/// Shows the need alone.
impl std::fmt::Debug for SharedKvDemand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.need().fmt(formatter)
    }
}
