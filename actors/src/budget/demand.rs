//! How much a model needs its keys and values, as its scheduler tells the budget without waiting for it.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::Budget;

/// How much a model needs its keys and values now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// It has no request.
    Idle,
    /// It has requests, and room for them.
    Busy,
    /// It has requests that wait for blocks.
    Hungry,
}

impl Need {
    pub(super) const ALL: [Need; 3] = [Need::Idle, Need::Busy, Need::Hungry];
}

/// A model's need, written by its scheduler and read by the budget.
pub struct Demand {
    need: AtomicU8,
    budget: Budget,
}

impl Demand {
    /// No need yet. `budget` hears of changes that it can do something about.
    pub fn new(budget: Budget) -> Self {
        Demand { need: AtomicU8::new(Need::Idle as u8), budget }
    }

    /// The need now.
    pub fn need(&self) -> Need {
        Need::ALL[usize::from(self.need.load(Relaxed))]
    }

    /// Sets the need.
    pub fn set(&self, need: Need) {
        if self.need.swap(need as u8, Relaxed) < need as u8 {
            self.budget.hears_of_need();
        }
    }
}

/// Shows the need alone.
impl std::fmt::Debug for Demand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.need().fmt(formatter)
    }
}
