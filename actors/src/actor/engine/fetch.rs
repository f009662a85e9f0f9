//! Download of a checkpoint's files, outside the actors because a network is slow.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use bursar_budgets::{Bytes, Hint};
use bursar_model::checkpoint::{CheckpointOrigin, CheckpointSource, FetchWatch};
use tokio::sync::oneshot;

use super::{Progress, ProgressSink, StartError};

/// Fetches the missing files. If the caller drops the future, the download ends at the next chunk.
/// The download holds no lease, so no task has to wait for its end.
pub(super) async fn fetch(origin: CheckpointOrigin, progress: ProgressSink) -> Result<CheckpointSource, StartError> {
    if !origin.is_remote() {
        let source = origin.fetch(&())?;
        for error in source.skipped_encoders() {
            tracing::warn!(%error, hint = error.hint(), "skipped a vision encoder file; the model does not accept pictures");
        }
        return Ok(source);
    }
    let given_up = GivenUp(Arc::default());
    let watch = Watch { progress, given_up: given_up.0.clone() };
    let (answer, brought) = oneshot::channel();
    // Use a dedicated thread: a program that exits would wait for a thread of tokio's blocking
    // pool.
    let thread = std::thread::Builder::new().name("bursar-fetch".to_owned());
    let spawned = thread.spawn(move || drop(answer.send(origin.fetch(&watch))));
    spawned.map_err(|error| StartError::Died(error.to_string()))?;
    let brought = brought.await.map_err(|_| StartError::Died("the download thread died".to_owned()))?;
    Ok(brought?)
}

/// Cancels the download when the caller drops the future.
struct GivenUp(Arc<AtomicBool>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

struct Watch {
    progress: ProgressSink,
    given_up: Arc<AtomicBool>,
}

impl FetchWatch for Watch {
    fn fetched(&self, file: &str, bytes: Bytes, bytes_total: Bytes) {
        (self.progress)(Progress::Fetching { file: file.into(), done: bytes, total: bytes_total });
    }

    fn is_cancelled(&self) -> bool {
        self.given_up.load(Relaxed)
    }
}
