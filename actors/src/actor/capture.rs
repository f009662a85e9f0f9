//! Capture of decode steps as graphs on a lane, one size after another.

use std::sync::Arc;

use bursar_budgets::Bytes;
use thiserror::Error;

use crate::{
    compute::{
        graph::{Captured, GraphKey, GraphLimits},
        lane::{Answer, CaptureJob, Job, Lane, LaneError},
    },
    responder::{AskError, Responder},
    tree::{self, Question},
};

/// The error for a size that was not captured. All earlier sizes were captured.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The lane answered with an error.
    #[error("capturing steps of {rows} rows failed: {source}")]
    Refused {
        /// Rows of the step.
        rows: usize,
        source: LaneError,
    },
    /// The lane did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
}

/// Makes `lane` capture the decode step in every size of `shape`, and counts each size in
/// `captured`. The largest size is captured first, because the driver can often reuse its memory
/// for the smaller sizes. Returns the bytes that the driver allocated for all sizes.
///
/// # Errors
/// The first size that was not captured.
pub async fn capture(
    lane: &Lane,
    shape: GraphLimits,
    question: Question,
    captured: &Captured,
) -> Result<Bytes, CaptureError> {
    let mut taken = Bytes::ZERO;
    captured.none();
    for size in shape.sizes().into_iter().rev() {
        taken += capture_one(lane, size, question).await?;
        captured.one_more();
    }
    Ok(taken)
}

/// Captures one size. Returns the bytes that the driver allocated for it, which are 0 on a device
/// without graphs.
pub(crate) async fn capture_one(lane: &Lane, size: GraphKey, question: Question) -> Result<Bytes, CaptureError> {
    let (reply, answer) = Responder::new();
    lane.submit(Job::Capture(CaptureJob { size, answer: Answer::to(|outcome| reply.answer(outcome)) }));
    let captured = question.wait(answer).await?;
    captured.map(Option::unwrap_or_default).map_err(|source| CaptureError::Refused { rows: size.rows, source })
}

async fn forget(lane: &Lane, size: GraphKey) -> Result<(), CaptureError> {
    let (reply, answer) = Responder::new();
    lane.submit(Job::Forget { size, answer: Answer::to(|outcome| reply.answer(outcome)) });
    let forgotten = tree::RECAPTURE.wait(answer).await?;
    forgotten.map_err(|source| CaptureError::Refused { rows: size.rows, source })
}

/// The outcome of [`recapture`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recaptured {
    /// Every size was captured.
    All,
    /// Only this size and larger sizes were captured, or no size if `None`. Graphs of smaller sizes
    /// would exceed the lease, so steps of these sizes are launched kernel by kernel.
    From(Option<GraphKey>),
}

/// Captures graphs again on a lane that replaces a dead lane, whose graphs were lost with it.
/// During this work, the new lane also runs steps. The lease of `paid` bytes keeps its size: the
/// size was measured for the same graphs and cannot grow after READY.
///
/// # Errors
/// The first size that was not captured, for example because this lane died too.
pub async fn recapture(
    lane: Lane,
    shape: GraphLimits,
    paid: Bytes,
    captured: Arc<Captured>,
) -> Result<Recaptured, CaptureError> {
    let (mut taken, mut smallest) = (Bytes::ZERO, None);
    captured.none();
    for size in shape.sizes().into_iter().rev() {
        taken += capture_one(&lane, size, tree::RECAPTURE).await?;
        if taken > paid {
            forget(&lane, size).await?;
            return Ok(Recaptured::From(smallest));
        }
        smallest = Some(size);
        captured.one_more();
    }
    Ok(Recaptured::All)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use bursar_model::flow::StepFormat;

    use super::*;

    fn shape() -> GraphLimits {
        GraphLimits::without_drafts(10, 64, FORMAT)
    }

    const FORMAT: StepFormat = StepFormat::TEXT;

    /// A lane whose graphs take 1 MiB each, except the graph of `free` rows, which takes none. The
    /// thread returns the requests that the lane received.
    fn lane(free: usize) -> (Lane, thread::JoinHandle<Vec<String>>) {
        let (lane, jobs) = Lane::by_hand();
        let asked = thread::spawn(move || {
            let done = jobs.into_iter().map(|job| match job {
                Job::Capture(CaptureJob { size: GraphKey { rows, .. }, answer }) => {
                    answer.give(Ok(Some(if rows == free { Bytes::ZERO } else { Bytes::mib(1) })));
                    format!("capture {rows}")
                }
                Job::Forget { size: GraphKey { rows, .. }, answer } => {
                    answer.give(Ok(()));
                    format!("forget {rows}")
                }
                _ => panic!("the test sends no other job"),
            });
            done.collect()
        });
        (lane, asked)
    }

    #[tokio::test]
    async fn every_size_is_captured_largest_first_and_its_bytes_are_reported() {
        let (lane, asked) = lane(4);
        let captured = Captured::default();
        (0..9).for_each(|_| captured.one_more());
        assert_eq!(
            capture(&lane, shape(), tree::CAPTURE, &captured).await.expect("the capture is answered"),
            Bytes::mib(4)
        );
        assert_eq!(captured.count(), 5, "graphs that were captured before do not count");
        drop(lane);
        let asked = asked.join().expect("the lane thread has ended");
        assert_eq!(asked, ["capture 10", "capture 8", "capture 4", "capture 2", "capture 1"]);
    }

    #[tokio::test]
    async fn a_second_capture_stays_within_the_leased_bytes() {
        let (same, asked) = lane(4);
        let outcome = recapture(same, shape(), Bytes::mib(4), Arc::default()).await.expect("the capture is answered");
        assert_eq!(outcome, Recaptured::All);
        assert_eq!(asked.join().expect("the lane thread has ended").len(), 5);
        let (larger, asked) = lane(0);
        let captured = Arc::<Captured>::default();
        let outcome =
            recapture(larger, shape(), Bytes::mib(2), captured.clone()).await.expect("the capture is answered");
        assert_eq!(captured.count(), 2, "the forgotten size is not counted");
        assert_eq!(
            outcome,
            Recaptured::From(Some(GraphKey::decode(8))),
            "batches of smaller sizes run without a graph"
        );
        assert_eq!(
            asked.join().expect("the lane thread has ended"),
            ["capture 10", "capture 8", "capture 4", "forget 4"]
        );
    }

    #[tokio::test]
    async fn a_lost_lane_ends_capturing_and_names_the_requested_size() {
        let (lane, jobs) = Lane::by_hand();
        drop(jobs);
        let outcome = capture(&lane, shape(), tree::CAPTURE, &Captured::default()).await;
        assert!(matches!(outcome, Err(CaptureError::Refused { rows: 10, source: LaneError::Gone })), "{outcome:?}");
    }
}
