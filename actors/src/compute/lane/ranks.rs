//! Jobs of several ranks: each rank gets the same work, and their answers are joined into one.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bursar_budgets::Bytes;
use bursar_model::worst_cases::Footprint;

use super::job::{Answer, CaptureJob, CopyJob, EncodeJob, Job, LaneError, StepJob, StressJob};

impl Job {
    /// Copies the job for each of `ranks` ranks.
    pub(super) fn for_each_of(self, ranks: usize) -> Vec<Job> {
        if ranks == 1 {
            return vec![self];
        }
        match self {
            Job::Step(job) => {
                let StepJob { batch, choices, scores, pins, spans, answer } = *job;
                let step = |(rank, answer)| {
                    let (batch, choices, scores) = (batch.clone(), choices.clone(), scores.clone());
                    let spans = if rank == 0 { spans.clone() } else { Vec::new() };
                    Job::Step(Box::new(StepJob { batch, choices, scores, pins: pins.clone(), spans, answer }))
                };
                // All ranks choose the same tokens, so the first answer is used.
                answer.of_each(ranks, |first, _| first).into_iter().enumerate().map(step).collect()
            }
            Job::Encode(job) => {
                let EncodeJob { batch, host, spans, answer } = *job;
                let encode = |(rank, answer)| {
                    let spans = if rank == 0 { spans.clone() } else { Vec::new() };
                    Job::Encode(Box::new(EncodeJob { batch: batch.clone(), host: host.clone(), spans, answer }))
                };
                answer.of_each(ranks, |(), ()| ()).into_iter().enumerate().map(encode).collect()
            }
            Job::Copy(job) => {
                let CopyJob { copied, answer } = *job;
                let copy = |answer| Job::Copy(Box::new(CopyJob { copied: copied.clone(), answer }));
                // Each rank copies its part of every KV block, or all vision cache rows. The ranks
                // copy at the same time, so the longest time counts.
                answer.of_each(ranks, Duration::max).into_iter().map(copy).collect()
            }
            Job::Stress(job) => {
                let StressJob { worst_case, depth, answer } = *job;
                let stress =
                    |answer| Job::Stress(Box::new(StressJob { worst_case: worst_case.clone(), depth, answer }));
                answer.of_each(ranks, larger).into_iter().map(stress).collect()
            }
            Job::Capture(CaptureJob { size, answer }) => {
                // A lease takes the same number of bytes on every rank, so the largest rank counts.
                let answers = answer.of_each(ranks, Option::<Bytes>::max);
                answers.into_iter().map(|answer| Job::Capture(CaptureJob { size, answer })).collect()
            }
            Job::Forget { size, answer } => {
                answer.of_each(ranks, |(), ()| ()).into_iter().map(|answer| Job::Forget { size, answer }).collect()
            }
            Job::FailLaunches { after, count } => only_last(ranks, Job::FailLaunches { after, count }),
            Job::Die => only_last(ranks, Job::Die),
            Job::Refuse => only_last(ranks, Job::Refuse),
            Job::Wake => (0..ranks).map(|_| Job::Wake).collect(),
        }
    }
}

/// Injects a fault on the last rank only.
fn only_last(ranks: usize, fault: Job) -> Vec<Job> {
    (1..ranks).map(|_| Job::Wake).chain([fault]).collect()
}

/// Returns a footprint that is large enough for both ranks.
fn larger(one: Footprint, other: Footprint) -> Footprint {
    Footprint { workspace: one.workspace.max(other.workspace), ..one }
}

/// Collects the answers of all ranks.
struct Joint<T> {
    answer: Option<Answer<T>>,
    left: usize,
    found: Option<Result<T, LaneError>>,
}

impl<T: Send + 'static> Answer<T> {
    /// Creates an answer for each of `ranks` ranks. Once all ranks have answered, `join` combines
    /// the outcomes, starting with the outcome of rank 0, and `self` gets the result. If ranks
    /// failed, `self` gets the error that is closest to the cause.
    fn of_each(self, ranks: usize, join: fn(T, T) -> T) -> Vec<Answer<T>> {
        let joint = Arc::new(Mutex::new(Joint { answer: Some(self), left: ranks, found: None }));
        let of = |rank| {
            let joint = joint.clone();
            Answer::to(move |outcome| Joint::take(&joint, rank, outcome, join))
        };
        (0..ranks).map(of).collect()
    }
}

impl<T> Joint<T> {
    fn take(joint: &Mutex<Self>, rank: usize, outcome: Result<T, LaneError>, join: fn(T, T) -> T) {
        // A poisoned value is still consistent, because each change is one assignment.
        let mut joint = joint.lock().unwrap_or_else(PoisonError::into_inner);
        joint.left -= 1;
        joint.found = Some(match (joint.found.take(), outcome) {
            (None, outcome) => outcome,
            (Some(Ok(found)), Ok(new)) if rank == 0 => Ok(join(new, found)),
            (Some(Ok(found)), Ok(new)) => Ok(join(found, new)),
            (Some(Err(error)), Ok(_)) | (Some(Ok(_)), Err(error)) => Err(error),
            (Some(Err(found)), Err(new)) => Err(if new.tells_more_than(&found) { new } else { found }),
        });
        if joint.left == 0 {
            let (answer, found) = (joint.answer.take(), joint.found.take());
            drop(joint);
            if let (Some(answer), Some(found)) = (answer, found) {
                answer.give(found);
            }
        }
    }
}

impl LaneError {
    /// Returns `true` if this error is closer to the cause than `other`. A rank that was refused
    /// memory or whose kernel failed makes the other ranks fail too.
    fn tells_more_than(&self, other: &LaneError) -> bool {
        let weight = |error: &LaneError| match error {
            error if error.is_out_of_memory() => 0,
            LaneError::Kernel(_) => 1,
            LaneError::Full { .. } => 2,
            LaneError::Gone => 3,
        };
        weight(self) < weight(other)
    }
}
