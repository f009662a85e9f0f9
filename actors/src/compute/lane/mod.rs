//! A lane: one ordered stream of device work with its thread and workspace.
//!
//! The thread waits only for its queue and its device, and answers every job once. A model over
//! several ranks has one thread per rank. All of them run the same jobs in the same order, answer
//! together, and end together. A lane begins the next job while the device runs the current one, so
//! that the device never waits for the host between two steps.

mod begun;
mod choosing;
mod copying;
mod decoding;
mod drafting;
mod graphs;
mod job;
mod launch;
mod model_runner;
mod pending;
mod ranks;

use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    thread,
};

use bursar_budgets::Timeline;
use bursar_kernels::Backend;
use tokio::sync::watch;

use begun::{Begun, UnderWay};
pub use job::{
    Acceptance, Answer, CaptureJob, Choice, Copied, CopyJob, EncodeJob, Job, LaneError, PastTokens, RefusalSink,
    StepJob, Stepped, StressJob,
};
pub use model_runner::ModelRunner;

/// Maximum jobs queued for a lane. The vision actor has at most two encoder batches and four copies
/// in flight, and the scheduler two steps and six copies. The remaining slots are for the jobs of
/// the profile.
const QUEUE: usize = 10;

/// Maximum jobs queued for the thread of a rank other than the first. The limit exceeds
/// the number of jobs by which such a rank can lag, so every rank accepts a job that the
/// first rank has accepted.
const QUEUE_BEHIND: usize = 4 * QUEUE;

/// A handle to a lane's threads.
#[derive(Clone)]
pub struct Lane {
    queues: Arc<Queues>,
    under_way: Arc<UnderWay>,
    /// One channel per rank, which is closed when the thread of that rank ends.
    ended: Vec<watch::Receiver<()>>,
}

/// The sending ends of a lane's queues, one for each rank.
struct Queues {
    ranks: Vec<SyncSender<Job>>,
    /// Held while a job is sent to all ranks, so that all ranks get jobs in the same order.
    order: Mutex<()>,
    shut_down: AtomicBool,
}

impl Lane {
    /// Starts a thread that runs jobs on `runner`. The thread ends when the lane is
    /// [shut down](Self::shut_down), when the last handle is dropped, or with a panic. When the
    /// device has completed the work in flight, the remaining jobs are answered with
    /// [`LaneError::Gone`].
    pub fn start<B: Backend + Send + 'static>(name: &str, runner: ModelRunner<B>, timeline: Timeline) -> Lane {
        Lane::of_ranks(name, vec![(runner, timeline)])
    }

    /// Starts a thread for each rank, as [`start`](Self::start) does for a single rank. When one
    /// thread ends, all threads end.
    ///
    /// # Panics
    /// If `ranks` is empty.
    pub fn of_ranks<B: Backend + Send + 'static>(name: &str, ranks: Vec<(ModelRunner<B>, Timeline)>) -> Lane {
        let (queues, jobs): (Vec<_>, Vec<_>) = (0..ranks.len()).map(|rank| sync_channel(queue_of(rank))).unzip();
        let queues = Arc::new(Queues::of(queues));
        let under_way = Arc::new(UnderWay::new(0));
        let start = |(rank, ((runner, timeline), jobs)): (usize, ((ModelRunner<B>, Timeline), _))| {
            let (running, ended) = watch::channel(());
            let (counted, together) = (under_way.clone(), Together(Arc::downgrade(&queues)));
            let name = if rank == 0 { name.to_owned() } else { format!("{name}-{rank}") };
            thread::Builder::new()
                .name(name)
                .spawn(move || {
                    // These locals are dropped in reverse order, after the jobs in flight. First
                    // the device completes all work and the timeline settles, then the memory is
                    // released, and only then is the end announced.
                    let _running = running;
                    let runner = runner;
                    let jobs = jobs;
                    let together = together;
                    Begun::new(&runner, timeline).work(&jobs, || together.are_shut_down(), &counted);
                })
                .expect("the operating system starts a lane's thread");
            ended
        };
        let ended = ranks.into_iter().zip(jobs).enumerate().map(start).collect();
        Lane { queues, under_way, ended }
    }

    /// Creates a lane whose jobs the test runs itself.
    #[cfg(test)]
    pub(crate) fn by_hand() -> (Lane, std::sync::mpsc::Receiver<Job>) {
        let (queue, jobs) = sync_channel(QUEUE);
        let ended = vec![watch::channel(()).1];
        (Lane { queues: Arc::new(Queues::of(vec![queue])), under_way: Arc::new(UnderWay::new(0)), ended }, jobs)
    }

    /// Submits a job. If the job cannot be queued, it is answered with an error at once.
    pub fn submit(&self, job: Job) {
        let is_counted = job.is_served();
        let jobs = job.for_each_of(self.queues.ranks.len());
        // The jobs are counted first, because the threads may finish them
        // before this function returns.
        if is_counted {
            self.under_way.send_modify(|under_way| *under_way += jobs.len());
        }
        let in_order = self.queues.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut refused = Vec::new();
        for (queue, job) in self.queues.ranks.iter().zip(jobs) {
            // If a rank does not accept the job, the earlier ranks have already got it. They notice
            // in a collective of the job that this rank is missing.
            let sent = if refused.is_empty() { queue.try_send(job) } else { Err(TrySendError::Disconnected(job)) };
            match sent {
                Ok(()) => {}
                Err(TrySendError::Full(job)) => refused.push((job, LaneError::Full { limit: QUEUE })),
                Err(TrySendError::Disconnected(job)) => refused.push((job, LaneError::Gone)),
            }
        }
        drop(in_order);
        if is_counted {
            self.under_way.send_modify(|under_way| *under_way -= refused.len());
        }
        for (job, error) in refused {
            job.fail(error);
        }
    }

    /// Waits until no step, encoder batch or copy of a serving actor is in flight, or all threads
    /// have ended. The successor of a dead actor calls this method, because jobs of its predecessor
    /// still use memory. Captures and worst cases are not waited for: they run in order, no
    /// replaceable actor submits them, and they touch no memory that such an actor has assigned.
    pub async fn idle(&self) {
        let mut under_way = self.under_way.subscribe();
        tokio::select! {
            _ = under_way.wait_for(|jobs| *jobs == 0) => {}
            () = self.ended() => {}
        }
    }

    pub fn is_alive(&self) -> bool {
        self.ended.iter().all(|ended| ended.has_changed().is_ok())
    }

    /// Waits until all threads have ended and released their memory. The returned future does not
    /// keep the threads alive.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let ended = self.ended.clone();
        async move {
            for mut ended in ended {
                while ended.changed().await.is_ok() {}
            }
        }
    }

    /// Shuts the threads down: they finish the jobs that they have begun, fail the queued jobs, and
    /// end. Waits until the threads have released their memory, which is required before that
    /// memory may be revoked.
    pub async fn shut_down(&self) {
        self.queues.shut_down();
        self.ended().await;
    }
}

fn queue_of(rank: usize) -> usize {
    if rank == 0 { QUEUE } else { QUEUE_BEHIND }
}

impl Queues {
    fn of(ranks: Vec<SyncSender<Job>>) -> Self {
        Queues { ranks, order: Mutex::default(), shut_down: AtomicBool::new(false) }
    }

    fn shut_down(&self) {
        self.shut_down.store(true, Ordering::Release);
        for queue in &self.ranks {
            // If the queue is full, the next queued job wakes the thread instead.
            drop(queue.try_send(Job::Wake));
        }
    }
}

/// A guard that the thread of each rank holds. Dropping one guard shuts down the threads of all
/// ranks.
struct Together(Weak<Queues>);

impl Together {
    /// Whether the lane is shut down or its last handle is dropped.
    fn are_shut_down(&self) -> bool {
        self.0.upgrade().is_none_or(|queues| queues.shut_down.load(Ordering::Acquire))
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        if let Some(queues) = self.0.upgrade() {
            queues.shut_down();
        }
    }
}
