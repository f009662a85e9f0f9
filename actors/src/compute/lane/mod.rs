//! A lane: one ordered stream of device work with its own thread and workspace. Its thread waits on its queue and its
//! device alone, and answers every job once. It begins the next job while the device runs one: the device never waits
//! for the host between two steps.

mod begun;
mod choosing;
mod graphs;
mod job;
mod model_runner;
mod pending;

use std::{
    sync::{
        Arc,
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
    Answer, CaptureJob, Choice, EncodeJob, Job, LaneError, PastTokens, RefusalSink, StepJob, Stepped, StressJob,
};
pub use model_runner::ModelRunner;

/// Jobs that may wait for a lane. A scheduler and a vision actor have two under way each; the rest is for the profile.
const QUEUE: usize = 4;

/// The way to a lane's thread.
#[derive(Clone)]
pub struct Lane {
    queue: SyncSender<Job>,
    shut_down: Arc<AtomicBool>,
    /// Jobs of serving actors, taken and not yet answered.
    under_way: Arc<UnderWay>,
    ended: watch::Receiver<()>,
}

type UnderWay = watch::Sender<usize>;

impl Lane {
    /// Starts a thread that runs jobs on `runner`. The thread ends when the last handle is gone, or with a panic; the jobs
    /// it had are then answered with [`LaneError::Gone`], when the device is past them.
    pub fn start<B: Backend + Send + 'static>(name: &str, runner: ModelRunner<B>, timeline: Timeline) -> Lane {
        let (queue, jobs) = sync_channel::<Job>(QUEUE);
        let shut_down = Arc::new(AtomicBool::new(false));
        let is_shut_down = shut_down.clone();
        let (running, ended) = watch::channel(());
        let under_way = Arc::new(UnderWay::new(0));
        let counted = under_way.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // Dropped in reverse: the device is past all work, the timeline settles and the memory goes before the
                // end is known.
                let _running = running;
                let runner = runner;
                let jobs = jobs;
                Begun::new(&runner, timeline).work(&jobs, &is_shut_down, &counted);
            })
            .expect("the operating system starts a lane's thread");
        Lane { queue, shut_down, under_way, ended }
    }

    /// A lane whose jobs a test does.
    #[cfg(test)]
    pub(crate) fn by_hand() -> (Lane, std::sync::mpsc::Receiver<Job>) {
        let (queue, jobs) = sync_channel(QUEUE);
        let ended = watch::channel(()).1;
        (Lane { queue, shut_down: Arc::default(), under_way: Arc::new(UnderWay::new(0)), ended }, jobs)
    }

    /// Hands a job to the lane. A job that cannot be taken is answered at once.
    pub fn submit(&self, job: Job) {
        let is_counted = job.is_served();
        // Counted first: the thread may be done with it before this returns.
        if is_counted {
            self.under_way.send_modify(|jobs| *jobs += 1);
        }
        let (job, error) = match self.queue.try_send(job) {
            Ok(()) => return,
            Err(TrySendError::Full(job)) => (job, LaneError::Full { limit: QUEUE }),
            Err(TrySendError::Disconnected(job)) => (job, LaneError::Gone),
        };
        if is_counted {
            self.under_way.send_modify(|jobs| *jobs -= 1);
        }
        job.fail(error);
    }

    /// Returns when no step and no launch of a serving actor is under way, or the thread has ended. Whoever takes over from
    /// a dead actor waits for this: what its predecessor submitted still reads and writes. Captures and worst cases under
    /// stress are not waited for: no actor that can be replaced asks for them, they touch nothing that it gave out, and
    /// they come one behind the other.
    pub async fn idle(&self) {
        let mut under_way = self.under_way.subscribe();
        tokio::select! {
            _ = under_way.wait_for(|jobs| *jobs == 0) => {}
            () = self.ended() => {}
        }
    }

    /// Whether the thread still runs.
    pub fn is_alive(&self) -> bool {
        self.ended.has_changed().is_ok()
    }

    /// Returns when the thread has ended and let go of its memory. Waiting does not keep the thread.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut ended = self.ended.clone();
        async move { while ended.changed().await.is_ok() {} }
    }

    /// Lets the thread finish what it has begun, fail what is behind that, and end; returns when it has let go of its memory. A lane is
    /// shut down before its memory may be revoked.
    pub async fn shut_down(&self) {
        self.shut_down.store(true, Ordering::Release);
        // A full queue is as good a bell as this job.
        self.submit(Job::Wake);
        self.ended().await;
    }
}
