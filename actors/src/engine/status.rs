//! The status of a model, for everything that waits for it.

use std::sync::Arc;

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

    /// Publishes `next`, unless a final status was published: the first reason stays. Returns whether it was published.
    pub(super) fn change(shown: &watch::Sender<Status>, next: Status) -> bool {
        shown.send_if_modified(|status| {
            let goes_on = !status.is_over();
            if goes_on {
                *status = next;
            }
            goes_on
        })
    }
}
