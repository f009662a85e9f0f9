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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credit_is_free_again_when_it_is_dropped_and_never_twice() {
        let credits = Credits::new(2);
        let (first, second) = (credits.take(), credits.clone().take());
        assert!(first.is_some() && second.is_some());
        assert!(credits.take().is_none(), "full is an answer");
        assert_eq!((credits.taken(), credits.limit()), (2, 2));
        drop(first);
        assert_eq!(credits.taken(), 1);
        assert!(credits.take().is_some());
        drop(second);
        assert_eq!(credits.taken(), 0);
    }

    #[test]
    fn without_credits_everything_is_too_much() {
        assert!(Credits::new(0).take().is_none());
    }
}
