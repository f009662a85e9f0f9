//! The status of a model, for everything that waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{Serving, StartError};

/// What a model's handles see.
#[derive(Clone)]
pub enum Status {
    /// Not ready yet, or between a death and its successors.
    Starting,
    /// Ready for requests.
    Ready(Serving),
    /// A wake failed, or a load that may wait for room. The runtime decides what follows.
    NotWoken(Arc<StartError>),
    /// The start failed.
    Failed(Arc<StartError>),
    /// The model was shut down, or gave up after a crash loop.
    Stopped {
        /// The reason given.
        reason: Arc<str>,
    },
}

impl Status {
    /// Whether this status is final.
    pub fn is_over(&self) -> bool {
        matches!(self, Status::Failed(_) | Status::Stopped { .. })
    }
}

/// Where a model's status is published.
pub struct StatusBoard {
    shown: watch::Sender<Status>,
    /// The actors of the last [`Status::Ready`].
    served_last: Mutex<Option<Serving>>,
}

impl StatusBoard {
    /// The board of a model that starts, and what its handles see.
    pub(crate) fn new() -> (Self, watch::Receiver<Status>) {
        let (shown, watched) = watch::channel(Status::Starting);
        (StatusBoard { shown, served_last: Mutex::default() }, watched)
    }

    /// The status that is shown. Do not hold it for long.
    pub fn look(&self) -> watch::Ref<'_, Status> {
        self.shown.borrow()
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Status> {
        self.shown.subscribe()
    }

    /// Publishes `next`, unless a final status was published: the first reason stays. Returns whether it was published.
    pub(super) fn change(&self, next: Status) -> bool {
        self.shown.send_if_modified(|status| {
            let goes_on = !status.is_over();
            if goes_on {
                match &next {
                    Status::Ready(serving) => *self.served_last() = Some(serving.clone()),
                    next if next.is_over() => *self.served_last() = None,
                    _ => {}
                }
                *status = next;
            }
            goes_on
        })
    }

    /// Shows the actors that served last, to handles that ask about a model which sleeps: it may have fallen asleep while
    /// they were replaced, or a wake may have failed.
    pub(crate) fn show_last(&self) {
        let last = self.served_last().clone();
        if let Some(last) = last {
            self.change(Status::Ready(last));
        }
    }

    fn served_last(&self) -> MutexGuard<'_, Option<Serving>> {
        self.served_last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
