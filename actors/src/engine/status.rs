//! How far a model is, for everybody who waits for it.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Serving, StartError};

/// What a model's handles see.
#[derive(Clone)]
pub enum Status {
    /// Not yet ready, or between a death and its successors.
    Starting,
    /// Requests may come.
    Ready(Serving),
    /// It could not be started.
    Failed(Arc<StartError>),
    /// It is over: shut down, or a crash loop.
    Stopped {
        /// Why.
        reason: Arc<str>,
    },
}

impl Status {
    /// Whether nothing comes after it.
    pub fn is_over(&self) -> bool {
        matches!(self, Status::Failed(_) | Status::Stopped { .. })
    }

    /// Lets handles see `next`, unless they have been told that it is over: the first reason stands. Whether they see it.
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
