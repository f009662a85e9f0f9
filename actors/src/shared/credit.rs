//! Credits, which limit how many operations of a kind are in progress at once.

use std::sync::Arc;

use bursar_budgets::Label;
use tokio::sync::watch;

use crate::metric;

/// A fixed number of credits. Taking a credit never waits. If no credit is left, the call returns
/// [`NoCredit::Full`].
#[derive(Clone, Debug)]
pub struct Credits {
    counts: Arc<watch::Sender<Counts>>,
    limit: usize,
}

#[derive(Debug, Default)]
struct Counts {
    taken: usize,
    closed: bool,
    /// For credits of requests, the model whose gauge shows the credits in use.
    model: Option<Label>,
}

impl Counts {
    /// Sets the gauge. Call this function inside the update that changes the count, so that two
    /// changes are never shown in the wrong order.
    fn show(&self) {
        self.model.iter().for_each(|model| metric::REQUESTS_ACTIVE.set(model, self.taken));
    }
}

/// One credit. Dropping this value returns the credit.
#[derive(Debug)]
pub struct Credit(Arc<watch::Sender<Counts>>);

/// Why no credit was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoCredit {
    /// All credits are taken.
    Full,
    /// The credits are closed for good.
    Closed,
}

impl Credits {
    /// Creates `limit` credits, which no gauge shows.
    pub fn new(limit: usize) -> Self {
        Credits { counts: Arc::default(), limit }
    }

    /// Creates `limit` credits for requests to `model`. A gauge shows the number of credits in use.
    pub fn of_requests(limit: usize, model: Label) -> Self {
        Credits { counts: Arc::new(watch::Sender::new(Counts { model: Some(model), ..Counts::default() })), limit }
    }

    /// Sets the gauge again, because a recorder may have been installed since the last change.
    pub fn show(&self) {
        self.counts.send_if_modified(|counts| {
            counts.show();
            false
        });
    }

    /// Takes `count` credits, or none if fewer are free. A caller that held some credits while
    /// waiting for the rest would block other callers.
    ///
    /// # Errors
    /// Fewer than `count` credits are free, or the credits are closed. The error is returned at
    /// once.
    pub fn take(&self, count: usize) -> Result<Vec<Credit>, NoCredit> {
        let mut outcome = Ok(());
        self.counts.send_if_modified(|counts| {
            outcome = match counts {
                Counts { closed: true, .. } => Err(NoCredit::Closed),
                Counts { taken, .. } if *taken + count > self.limit => Err(NoCredit::Full),
                Counts { taken, .. } => {
                    *taken += count;
                    Ok(())
                }
            };
            counts.show();
            outcome.is_ok()
        });
        outcome.map(|()| (0..count).map(|_| Credit(self.counts.clone())).collect())
    }

    /// Stops giving out credits. Credits already taken stay valid until they are dropped.
    pub fn close(&self) {
        self.counts.send_modify(|counts| counts.closed = true);
    }

    /// Waits until no credit is taken.
    pub async fn idle(&self) {
        let mut counts = self.counts.subscribe();
        // `self` keeps the sender alive, so this wait cannot fail.
        drop(counts.wait_for(|counts| counts.taken == 0).await);
    }

    /// The number of credits, free and taken.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The number of credits taken.
    pub fn taken(&self) -> usize {
        self.counts.borrow().taken
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.0.send_modify(|counts| {
            counts.taken -= 1;
            counts.show();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_credit_is_returned_exactly_once() {
        let credits = Credits::new(2);
        let (first, second) = (credits.take(1), credits.clone().take(1));
        assert!(first.is_ok() && second.is_ok());
        assert_eq!(credits.take(1).err(), Some(NoCredit::Full), "all credits are taken");
        assert_eq!((credits.taken(), credits.limit()), (2, 2));
        drop(first);
        assert_eq!(credits.taken(), 1);
        assert!(credits.take(1).is_ok());
        drop(second);
        assert_eq!(credits.taken(), 0);
    }

    #[test]
    fn several_credits_are_taken_together_or_not_at_all() {
        let credits = Credits::new(3);
        let two = credits.take(2).expect("three credits are available");
        assert_eq!(credits.take(2).err(), Some(NoCredit::Full));
        assert_eq!(credits.taken(), 2, "refused credits are not counted");
        drop(two);
        assert_eq!(credits.take(3).map(|credits| credits.len()), Ok(3));
    }

    #[test]
    fn zero_credits_refuse_every_request() {
        assert_eq!(Credits::new(0).take(1).err(), Some(NoCredit::Full));
    }

    #[tokio::test]
    async fn closed_credits_are_idle_after_the_last_is_returned() {
        let credits = Credits::new(2);
        let taken = credits.take(1);
        credits.close();
        assert_eq!(credits.take(1).err(), Some(NoCredit::Closed), "closed credits cannot be taken");
        let waiting = tokio::spawn({
            let credits = credits.clone();
            async move { credits.idle().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "one credit is still taken");
        drop(taken);
        waiting.await.expect("the waiting task does not panic");
    }
}
