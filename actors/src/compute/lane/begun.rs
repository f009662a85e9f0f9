//! The jobs that a lane has begun and not finished, the oldest first, and the loop that begins and finishes them.

use std::{
    collections::VecDeque,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

use bursar_budgets::{Ticket, Timeline};
use bursar_kernels::Backend;

use super::{Job, ModelRunner, UnderWay, pending::Pending};

/// Jobs begun at once: one that the device runs and one queued after it, so that the device never waits for the host.
const BEGUN: usize = 2;

/// How long a finished job may stay unanswered while the lane looks for the next one. A decode step takes milliseconds,
/// and the next one is on the device already.
const LOOK: Duration = Duration::from_micros(50);

/// Dropping this in any way waits for the device, because begun work still uses what the jobs hold. After that every
/// fence of the lane has passed, and only then do the jobs hear that their lane has gone.
pub(super) struct Begun<'b, B: Backend> {
    runner: &'b ModelRunner<B>,
    timeline: Timeline,
    jobs: VecDeque<(Ticket, Pending)>,
}

impl<'b, B: Backend> Begun<'b, B> {
    pub(super) fn new(runner: &'b ModelRunner<B>, timeline: Timeline) -> Self {
        Begun { runner, timeline, jobs: VecDeque::with_capacity(BEGUN) }
    }

    /// Takes jobs until every handle is dropped, the lane is shut down, or its ranks have gone apart. Jobs begun by
    /// then are finished.
    pub(super) fn work(&mut self, jobs: &Receiver<Job>, is_shut_down: impl Fn() -> bool, under_way: &UnderWay) {
        while !self.runner.is_apart() {
            // Answer finished jobs before launching more. On a device that computes inside the launch, a launch takes
            // as long as a step.
            let waits = self.jobs.front().is_some_and(|(_, oldest)| !oldest.has_come());
            let next = match self.jobs.len() {
                0 => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                1 if waits && self.jobs[0].1.may_be_followed() => jobs.recv_timeout(LOOK),
                _ => {
                    self.finish_oldest(under_way);
                    continue;
                }
            };
            match next {
                Ok(job) if !is_shut_down() => self.begin(job),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(_) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        while !self.jobs.is_empty() {
            self.finish_oldest(under_way);
        }
    }

    fn begin(&mut self, job: Job) {
        let ticket = self.timeline.issue();
        let pending = self.runner.begin(job);
        self.jobs.push_back((ticket, pending));
    }

    fn finish_oldest(&mut self, under_way: &UnderWay) {
        let (ticket, pending) = self.jobs.pop_front().expect("a job was begun");
        let was_counted = pending.is_served();
        let answer = pending.finish(self.runner);
        self.timeline.complete(ticket);
        answer();
        if was_counted {
            under_way.send_modify(|jobs| *jobs -= 1);
        }
    }
}

impl<B: Backend> Drop for Begun<'_, B> {
    fn drop(&mut self) {
        self.runner.wait_for_device();
        self.timeline.settle();
    }
}
