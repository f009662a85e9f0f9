//! Progress of a start, for its listener.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_model::Depth;

use super::{AttemptReport, Notice, Phase};

/// An event of a start.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// A file of the checkpoint is downloaded from the hub.
    Fetching {
        file: Arc<str>,
        /// Bytes downloaded so far, including bytes that were found on disk.
        done: Bytes,
        /// Size of the file.
        total: Bytes,
    },
    /// Files are checked and worst cases are planned.
    Planning,
    /// Weights are copied to the device.
    Loading {
        /// Bytes copied so far.
        done: Bytes,
        /// Bytes of all weights.
        total: Bytes,
    },
    Profiling {
        /// Name of the worst case, or of the other work that is in progress.
        what: &'static str,
        /// Layers that the worst case runs through. [`Depth::Whole`] for other work.
        depth: Depth,
        done: usize,
        total: usize,
    },
    Phase(Phase),
    /// An attempt has ended. If an attempt was ready and is later refused memory while the model
    /// serves, it is reported a second time with the same number. The next attempt has a new
    /// number.
    Attempt(AttemptReport),
    /// The start continues, but there is a condition that the user should know about.
    Notice(Notice),
    /// The model accepts requests.
    Ready,
}

/// Receives every event of a start. Must not block.
pub type ProgressSink = Arc<dyn Fn(Progress) + Send + Sync>;
