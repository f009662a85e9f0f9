//! The status of a model, for everything that waits for it.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_model::Depth;
use tokio::sync::watch;

use super::{Serving, StartError};
use crate::profile::{AttemptReport, Notice, Phase};

/// What a model's handles see.
#[derive(Clone)]
pub enum Status {
    /// Not ready yet, or between a death and its successors.
    Starting,
    /// Ready for requests.
    Ready(Serving),
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

/// A step of the start.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// A file of the checkpoint is being fetched from the hub.
    Fetching {
        /// The file's name.
        file: Arc<str>,
        /// Bytes so far, including those that were already here.
        done: Bytes,
        /// Bytes in all.
        total: Bytes,
    },
    /// Files are being checked and worst cases planned.
    Planning,
    /// Weights are being copied.
    Loading {
        /// Bytes so far.
        done: Bytes,
        /// Bytes in all.
        total: Bytes,
    },
    /// Worst cases are being run.
    Profiling {
        /// The worst case, or the other work being done.
        what: &'static str,
        /// How many layers of a worst case run; [`Depth::Whole`] for other work.
        depth: Depth,
        /// Steps so far.
        done: usize,
        /// Steps in all.
        total: usize,
    },
    /// An attempt enters a phase.
    Phase(Phase),
    /// An attempt has ended. An attempt that was ready and is later refused memory is reported again by the same
    /// number; what serves afterwards is a new attempt.
    Attempt(AttemptReport),
    /// The start goes on, but something is worth knowing.
    Notice(Notice),
    /// Requests may come.
    Ready,
}

/// Called for each step of the start. It must not block.
pub type ProgressSink = Arc<dyn Fn(Progress) + Send + Sync>;
