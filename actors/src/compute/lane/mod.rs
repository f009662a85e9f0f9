//! A lane: one ordered stream of device work with its own thread and workspace. The thread waits only for its queue and
//! its device, and answers every job once. A model over several ranks has a thread for each, which all run the same
//! jobs in the same order, answer together, and end together. It begins the next job while the device runs one, so that
//! the device never waits for the host between two steps.

mod begun;
mod choosing;
mod copying;
mod graphs;
mod job;
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

use begun::Begun;
pub use job::{
    Answer, CaptureJob, Choice, Copied, CopyJob, EncodeJob, Job, LaneError, PastTokens, RefusalSink, StepJob, Stepped,
    StressJob,
};
pub use model_runner::ModelRunner;

/// Jobs that may wait for a lane. The vision actor has at most two launches running and four copies, the scheduler two steps
/// and six copies; the rest is for the profile.
const QUEUE: usize = 10;

/// Jobs that may wait for another rank's thread than the first: more than the first has taken. So a job that the first
/// takes is taken by all.
const QUEUE_BEHIND: usize = 4 * QUEUE;

/// A handle to a lane's threads.
#[derive(Clone)]
pub struct Lane {
    queues: Arc<Queues>,
    /// Jobs of serving actors, submitted and not answered, for each rank.
    under_way: Arc<UnderWay>,
    /// One for each rank.
    ended: Vec<watch::Receiver<()>>,
}

/// The ends of a lane's queues that jobs go into, one for each rank.
struct Queues {
    ranks: Vec<SyncSender<Job>>,
    /// Held while a job goes to all ranks, so that all get the same order.
    order: Mutex<()>,
    shut_down: AtomicBool,
}

type UnderWay = watch::Sender<usize>;

impl Lane {
    /// Starts a thread that runs jobs on `runner`. The thread ends when the last handle is dropped, or with a panic.
    /// Once the device is past its remaining jobs, they are answered with [`LaneError::Gone`].
    pub fn start<B: Backend + Send + 'static>(name: &str, runner: ModelRunner<B>, timeline: Timeline) -> Lane {
        Lane::of_ranks(name, vec![(runner, timeline)])
    }

    /// As [`start`](Self::start), a thread for each rank. When one ends, all do.
    ///
    /// # Panics
    /// Without a rank.
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
                    // Dropped in reverse order: the device is past all work, then the timeline settles, then the memory
                    // goes, and only then is the end announced.
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

    /// A lane whose jobs a test runs.
    #[cfg(test)]
    pub(crate) fn by_hand() -> (Lane, std::sync::mpsc::Receiver<Job>) {
        let (queue, jobs) = sync_channel(QUEUE);
        let ended = vec![watch::channel(()).1];
        (Lane { queues: Arc::new(Queues::of(vec![queue])), under_way: Arc::new(UnderWay::new(0)), ended }, jobs)
    }

    /// Submits a job. If it cannot be queued, it is answered with an error at once.
    pub fn submit(&self, job: Job) {
        let is_counted = job.is_served();
        let jobs = job.for_each_of(self.queues.ranks.len());
        // Counted first, because the threads may finish it before this returns.
        if is_counted {
            self.under_way.send_modify(|under_way| *under_way += jobs.len());
        }
        let in_order = self.queues.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut refused = Vec::new();
        for (queue, job) in self.queues.ranks.iter().zip(jobs) {
            // Ranks before one that does not take a job find that it does not come.
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

    /// Waits until no step or launch of a serving actor is running, or the thread has ended. A successor of a dead
    /// actor calls this, because its predecessor's jobs still use memory. Captures and worst cases are not waited for:
    /// no replaceable actor asks for them, they touch nothing that one gave out, and they run in order.
    pub async fn idle(&self) {
        let mut under_way = self.under_way.subscribe();
        tokio::select! {
            _ = under_way.wait_for(|jobs| *jobs == 0) => {}
            () = self.ended() => {}
        }
    }

    /// Whether all threads still run.
    pub fn is_alive(&self) -> bool {
        self.ended.iter().all(|ended| ended.has_changed().is_ok())
    }

    /// Waits until all threads have ended and released their memory. Waiting does not keep them alive.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let ended = self.ended.clone();
        async move {
            for mut ended in ended {
                while ended.changed().await.is_ok() {}
            }
        }
    }

    /// Shuts the threads down: they finish the jobs that they have begun, fail the queued ones, and end. Waits until
    /// they have released their memory. Required before that memory may be revoked.
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
            // If the queue is full, its next job wakes the thread just as well.
            drop(queue.try_send(Job::Wake));
        }
    }
}

/// Held by the thread of each rank: when it drops, all of them end.
struct Together(Weak<Queues>);

impl Together {
    /// Also true once no handle is left.
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
