//! Credits: how many of a thing may be under way at once.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A fixed number of credits. Full is an answer, never a wait.
#[derive(Clone, Debug)]
pub struct Credits {
    free: Arc<Semaphore>,
    limit: usize,
}

/// One credit, given back on drop.
#[derive(Debug)]
pub struct Credit(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit);

impl Credits {
    /// `limit` credits.
    pub fn new(limit: usize) -> Self {
        Credits { free: Arc::new(Semaphore::new(limit)), limit }
    }

    /// Takes one, if one is free.
    pub fn take(&self) -> Option<Credit> {
        self.free.clone().try_acquire_owned().ok().map(Credit)
    }

    /// How many there are.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.limit - self.free.available_permits()
    }
}
