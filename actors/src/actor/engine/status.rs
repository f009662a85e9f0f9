//! The status of a model, for handles and actors that wait for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{Serving, StartError};

/// The status that a model's handles see.
#[derive(Clone)]
pub enum Status {
    /// The model is not ready yet, or its actors are being replaced after a death or a refusal of
    /// memory.
    Starting,
    Ready(Serving),
    /// A wake-up has failed, or a load that may wait for memory has failed. The runtime decides
    /// what happens next.
    NotWoken(Arc<StartError>),
    Failed(Arc<StartError>),
    /// The model was shut down or given up after a crash loop, or its runtime has failed.
    Stopped {
        reason: Arc<str>,
    },
}

impl Status {
    /// Whether this status is final.
    pub fn is_over(&self) -> bool {
        matches!(self, Status::Failed(_) | Status::Stopped { .. })
    }
}

/// Publishes a model's status to the model's handles and to actors that watch it.
pub struct StatusBoard {
    shown: watch::Sender<Status>,
    /// The serving actors of the last [`Status::Ready`].
    served_last: Mutex<Option<Serving>>,
}

impl StatusBoard {
    /// Creates the board of a model that starts, and the receiver for the model's handles.
    pub(crate) fn new() -> (Self, watch::Receiver<Status>) {
        let (shown, watched) = watch::channel(Status::Starting);
        (StatusBoard { shown, served_last: Mutex::default() }, watched)
    }

    /// Returns the current status. Drop the returned value soon, because it holds a lock.
    pub fn borrow(&self) -> watch::Ref<'_, Status> {
        self.shown.borrow()
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Status> {
        self.shown.subscribe()
    }

    /// Publishes `next`, unless a final status was published earlier: the first reported reason
    /// wins. Returns whether `next` was published.
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

    /// Publishes the actors that served last, for handles of a sleeping model. The current status
    /// may be different, because the model may have been put to sleep while its actors were being
    /// replaced, or a wake may have failed.
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
