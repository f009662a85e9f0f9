//! How far a start is, for its listener.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_model::Depth;

use super::{AttemptReport, Notice, Phase};

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
    /// An attempt has ended. One that was ready and is then refused memory while it serves is reported again, by the same
    /// number; the attempt that serves after it has another.
    Attempt(AttemptReport),
    /// It goes on, but not as it was hoped.
    Notice(Notice),
    /// Requests may come.
    Ready,
}

/// Hears of every moment; it must not block.
pub type ProgressSink = Arc<dyn Fn(Progress) + Send + Sync>;
