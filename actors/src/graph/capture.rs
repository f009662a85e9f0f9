//! Asking a lane to capture decoding, size after size.

use std::sync::Arc;

use bursar_budgets::Bytes;
use thiserror::Error;

use super::GraphShape;
use crate::{
    lane::{Answer, CaptureJob, Job, Lane, LaneError},
    memory::EngineMemory,
    reply::{AskError, Reply},
    tree::{self, Question},
};

/// A size that was not captured. Those before it were.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The lane said why.
    #[error("steps of {rows} rows: {source}")]
    Refused {
        /// Which size.
        rows: usize,
        /// What it said.
        source: LaneError,
    },
    /// The lane did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
}

/// Has `lane` capture decoding in every size of `shape`, largest first: what a driver takes for a large one often does for
/// a small one too. Gives what the driver took for all of them.
///
/// # Errors
/// The first size that was not captured.
pub async fn capture(lane: &Lane, shape: GraphShape, question: Question) -> Result<Bytes, CaptureError> {
    let mut taken = Bytes::ZERO;
    for rows in shape.buckets().into_iter().rev() {
        taken += capture_one(lane, rows, question).await?;
    }
    Ok(taken)
}

async fn capture_one(lane: &Lane, rows: usize, question: Question) -> Result<Bytes, CaptureError> {
    let (reply, answer) = Reply::new();
    lane.submit(Job::Capture(CaptureJob { rows, answer: Answer::to(|outcome| reply.answer(outcome)) }));
    let captured = question.wait(answer).await?;
    captured.map(Option::unwrap_or_default).map_err(|source| CaptureError::Refused { rows, source })
}

/// What came of capturing again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recaptured {
    /// Every size.
    All,
    /// The sizes from this one on. Those below it would have taken more than is leased, and run in this one.
    From(usize),
}

/// Captures again on a lane that took over from one that died, while it decodes: what the old lane had went with it. The
/// lease stays as it is: it was measured for the same graphs, and after READY it could not grow.
///
/// # Errors
/// The first size that was not captured, as when this lane dies too.
pub async fn recapture(lane: Lane, memory: Arc<EngineMemory>) -> Result<Recaptured, CaptureError> {
    let Some(inputs) = &memory.graphs else { return Ok(Recaptured::All) };
    let paid = inputs.paid().map_or(Bytes::ZERO, |lease| lease.bytes());
    let (mut taken, mut smallest) = (Bytes::ZERO, 0);
    for rows in inputs.shape().buckets().into_iter().rev() {
        taken += capture_one(&lane, rows, tree::RECAPTURE).await?;
        if taken > paid {
            lane.submit(Job::Forget { rows });
            return Ok(Recaptured::From(smallest));
        }
        smallest = rows;
    }
    Ok(Recaptured::All)
}
