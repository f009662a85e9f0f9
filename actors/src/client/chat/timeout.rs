//! Deadlines of a request, and which of them have been met.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use tokio::time::{Instant, timeout_at};

use super::ChatError;
use crate::deadline::{Deadline, Deadlines};

/// The deadlines of one request. Clones share the record of deadlines that have been met.
#[derive(Clone, Debug)]
pub(crate) struct DeadlineTracker {
    asked: Instant,
    limits: Deadlines,
    /// `true` once the first step is planned. All samples of a chat share this flag: once the first
    /// sample has begun, the samples that wait for its prompt count as begun too.
    has_begun: Arc<AtomicBool>,
    has_token: Arc<AtomicBool>,
}

impl DeadlineTracker {
    pub(crate) fn new(asked: Instant, limits: Deadlines) -> Self {
        DeadlineTracker { asked, limits, has_begun: Arc::default(), has_token: Arc::default() }
    }

    /// Creates the deadlines of another sample of the chat.
    pub(crate) fn of_sample(&self) -> Self {
        DeadlineTracker { has_token: Arc::default(), ..self.clone() }
    }

    /// Records that the first step is planned.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Relaxed);
    }

    /// Records that the first token is ready.
    pub(crate) fn token(&self) {
        self.has_token.store(true, Relaxed);
    }

    fn is_met(&self, deadline: Deadline) -> bool {
        match deadline {
            Deadline::Queue => self.has_begun.load(Relaxed),
            Deadline::FirstToken => self.has_token.load(Relaxed),
            Deadline::Reply => false,
        }
    }

    /// Returns the time left for each deadline that is not yet met.
    pub(crate) fn left(&self) -> Deadlines {
        let waited = self.asked.elapsed();
        self.limits.map(|deadline, limit| (!self.is_met(deadline)).then(|| limit.saturating_sub(waited)))
    }

    /// Returns `true` if a deadline has passed without being met.
    pub(crate) fn is_over(&self) -> bool {
        let waited = self.asked.elapsed();
        let is_missed = |deadline: &Deadline| {
            self.limits.of(*deadline).is_some_and(|limit| limit <= waited) && !self.is_met(*deadline)
        };
        Deadline::ALL.iter().any(is_missed)
    }

    /// Runs `work`. Returns an error as soon as a deadline is missed.
    pub(crate) async fn hold<T>(&self, work: impl Future<Output = T>) -> Result<T, ChatError> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            deadline = self.missed() => Err(self.error(deadline)),
        }
    }

    /// Waits until a deadline passes without being met.
    async fn missed(&self) -> Deadline {
        // A deadline beyond the range of `Instant` means no deadline.
        let at = |deadline: Deadline| Some((self.asked.checked_add(self.limits.of(deadline)?)?, deadline));
        let mut deadlines: Vec<_> = Deadline::ALL.into_iter().filter_map(at).collect();
        deadlines.sort();
        for (at, deadline) in deadlines {
            drop(timeout_at(at, std::future::pending::<()>()).await);
            if !self.is_met(deadline) {
                return deadline;
            }
        }
        std::future::pending().await
    }

    /// Returns the error of a request that missed this deadline or can no longer meet it.
    pub(crate) fn error(&self, deadline: Deadline) -> ChatError {
        let limit = self.limits.of(deadline).unwrap_or_default();
        ChatError::TooLate { deadline, limit, waited: self.asked.elapsed() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn seconds(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    async fn missed(tracker: &DeadlineTracker) -> (Deadline, Duration) {
        match tracker.hold(std::future::pending::<()>()).await {
            Err(ChatError::TooLate { deadline, waited, .. }) => (deadline, waited),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn deadlines_count_from_the_request_until_they_are_met() {
        let limits = Deadlines { queue: seconds(1), first_token: seconds(2), reply: seconds(3) };
        let tracker = DeadlineTracker::new(Instant::now(), limits);
        assert_eq!((tracker.left(), tracker.is_over()), (limits, false));
        let (deadline, waited) = missed(&tracker).await;
        assert_eq!((deadline, waited.as_secs(), tracker.is_over()), (Deadline::Queue, 1, true));
        tracker.begin();
        assert_eq!(
            (tracker.left().queue, tracker.is_over()),
            (None, false),
            "the queue deadline is met, although late"
        );
        let sample = tracker.of_sample();
        tracker.token();
        assert_eq!(
            missed(&sample).await.0,
            Deadline::FirstToken,
            "each sample has a separate deadline for its first token"
        );
        assert_eq!(tracker.left(), Deadlines { reply: seconds(1), ..Deadlines::default() });
        let (deadline, waited) = missed(&tracker).await;
        assert_eq!((deadline, waited.as_secs()), (Deadline::Reply, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn work_within_its_deadline_is_not_interrupted() {
        let tracker =
            DeadlineTracker::new(Instant::now(), Deadlines { reply: Some(Duration::MAX), ..Deadlines::default() });
        assert_eq!(tracker.hold(async { 7 }).await.ok(), Some(7));
        let wait = timeout_at(Instant::now() + Duration::from_secs(1_000_000), tracker.missed());
        assert!(wait.await.is_err(), "the wait has no deadline");
    }
}
