//! How far a model is, for everybody who waits for it.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_model::Depth;
use tokio::sync::watch;

use super::{Serving, StartError};
use crate::profile::{AttemptReport, Notice, Phase};

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

/// A moment of the start.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// A file of the checkpoint is fetched from the hub.
    Fetching {
        /// Its name.
        file: Arc<str>,
        /// So far, with what was here before.
        done: Bytes,
        /// In all.
        total: Bytes,
    },
    /// Files are checked and worst cases planned.
    Planning,
    /// Weights are copied.
    Loading {
        /// So far.
        done: Bytes,
        /// In all.
        total: Bytes,
    },
    /// Worst cases are run.
    Profiling {
        /// Which, or what else is being done.
        what: &'static str,
        /// Through which layers a worst case runs; [`Depth::Whole`] of anything else.
        depth: Depth,
        /// Steps so far.
        done: usize,
        /// Steps in all.
        total: usize,
    },
    /// An attempt enters a phase.
    Phase(Phase),
    /// An attempt has ended. One that was ready and is then refused memory while it serves is told of again, by the same
    /// number; what serves behind it is another.
    Attempt(AttemptReport),
    /// It goes on, but not as it was hoped.
    Notice(Notice),
    /// Requests may come.
    Ready,
}

/// Hears of every moment; it must not block.
pub type ProgressSink = Arc<dyn Fn(Progress) + Send + Sync>;
