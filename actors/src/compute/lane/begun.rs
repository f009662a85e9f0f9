//! The jobs that a lane has begun but not finished, oldest first, and the loop that
//! begins and finishes jobs.

use std::{
    collections::VecDeque,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

use bursar_budgets::{Ticket, Timeline};
use bursar_kernels::Backend;
use tokio::sync::watch;

use super::{Job, ModelRunner, copying::CopyBegun, pending::Pending};

/// Maximum jobs in flight: one that the device runs and one queued after it, so that the device
/// never waits for the host. Copies of blocks are not counted.
const BEGUN: usize = 2;

/// Maximum time that the lane waits for the next job while another job is in flight. The answer to
/// a job that finishes during the wait is delayed by at most this time. The delay is harmless,
/// because a decode step takes milliseconds.
const LOOK: Duration = Duration::from_micros(50);

/// Number of jobs of serving actors that are submitted and not answered, counted once per rank.
pub(super) type UnderWay = watch::Sender<usize>;

/// The jobs and copies that a lane has begun and not finished. Dropping this value, also during a
/// panic, waits for the device, because launched work still uses the memory that the jobs hold.
/// After that, every fence of the lane has passed. Only then are the jobs answered with
/// [`LaneError::Gone`](super::LaneError::Gone).
pub(super) struct Begun<'b, B: Backend> {
    runner: &'b ModelRunner<B>,
    timeline: Timeline,
    /// The tickets of all jobs and copies in order, and whether the device has completed each.
    issued: VecDeque<(Ticket, bool)>,
    jobs: VecDeque<(Ticket, Pending)>,
    copies: VecDeque<(Ticket, CopyBegun)>,
    /// A job that was taken from the queue while the lane looked for copies. The job waits here
    /// until it may begin.
    next: Option<Job>,
}

impl<'b, B: Backend> Begun<'b, B> {
    pub(super) fn new(runner: &'b ModelRunner<B>, timeline: Timeline) -> Self {
        let (jobs, copies) = (VecDeque::with_capacity(BEGUN), VecDeque::new());
        Begun { runner, timeline, issued: VecDeque::new(), jobs, copies, next: None }
    }

    /// Runs jobs until every handle is dropped, the lane is shut down, or its ranks are
    /// desynchronized. Jobs begun by then are finished.
    pub(super) fn work(&mut self, jobs: &Receiver<Job>, is_shut_down: impl Fn() -> bool, under_way: &UnderWay) {
        while !self.runner.is_desynchronized() {
            self.finish_copies(under_way);
            // Finished jobs are answered before more are launched. On a device that computes inside
            // the launch call, a launch takes as long as a step.
            let oldest = self.jobs.front().map(|(_, oldest)| oldest);
            let waits = oldest.is_some_and(|oldest| !oldest.is_ready());
            let may_follow = oldest.is_none_or(|oldest| waits && oldest.may_be_followed());
            let may_begin = may_follow && self.jobs.len() < BEGUN;
            // If no other job may begin, the lane takes jobs from the queue only to find copies.
            let looks = may_begin || (waits && self.next.is_none() && self.runner.copies);
            let next = match self.next.take_if(|_| may_begin) {
                Some(job) => Ok(job),
                None if self.jobs.is_empty() && self.copies.is_empty() => {
                    jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
                None if looks => jobs.recv_timeout(LOOK),
                None => {
                    self.finish_oldest(under_way);
                    continue;
                }
            };
            match next {
                Ok(job) if is_shut_down() => {
                    drop(job);
                    break;
                }
                Ok(Job::Copy(job)) => {
                    let ticket = self.issue();
                    self.copies.push_back((ticket, self.runner.begin_copies(job)));
                }
                Ok(job) if may_begin => self.begin(job),
                Ok(job) => self.next = Some(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        while !self.jobs.is_empty() {
            self.finish_oldest(under_way);
        }
        while !self.copies.is_empty() {
            self.finish_oldest_copy(under_way);
        }
    }

    fn begin(&mut self, job: Job) {
        let ticket = self.issue();
        let pending = self.runner.begin(job);
        self.jobs.push_back((ticket, pending));
    }

    fn issue(&mut self) -> Ticket {
        let ticket = self.timeline.issue();
        self.issued.push_back((ticket, false));
        ticket
    }

    /// Marks this work as complete on the device. The timeline completes it once all work issued
    /// earlier is complete too.
    fn complete(&mut self, ticket: Ticket) {
        let issued = self.issued.iter_mut().find(|(issued, _)| *issued == ticket);
        issued.expect("the ticket was issued and is not complete").1 = true;
        while let Some((ticket, true)) = self.issued.front().copied() {
            self.issued.pop_front();
            self.timeline.complete(ticket);
        }
    }

    fn finish_oldest(&mut self, under_way: &UnderWay) {
        let (ticket, pending) = self.jobs.pop_front().expect("a job was begun");
        let was_counted = pending.is_served();
        let answer = pending.finish(self.runner);
        // The copies that a step waited for were complete before the step. They are answered before
        // the step.
        self.finish_copies(under_way);
        self.complete(ticket);
        answer();
        if was_counted {
            under_way.send_modify(|jobs| *jobs -= 1);
        }
    }

    /// Answers the copies that the device has completed.
    fn finish_copies(&mut self, under_way: &UnderWay) {
        while self.copies.front().is_some_and(|(_, oldest)| oldest.is_ready()) {
            self.finish_oldest_copy(under_way);
        }
    }

    fn finish_oldest_copy(&mut self, under_way: &UnderWay) {
        let (ticket, copies) = self.copies.pop_front().expect("copies were begun");
        let answer = copies.finish(self.runner);
        self.complete(ticket);
        answer();
        under_way.send_modify(|jobs| *jobs -= 1);
    }
}

impl<B: Backend> Drop for Begun<'_, B> {
    fn drop(&mut self) {
        self.runner.wait_for_device();
        self.timeline.settle();
    }
}
