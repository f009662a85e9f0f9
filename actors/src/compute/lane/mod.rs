//! A lane: one ordered stream of device work with its own thread and workspace. The thread waits only for its queue and
//! its device, and answers every job once. It begins the next job while the device runs one, so that the device never
//! waits for the host between two steps.

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

/// Jobs that may wait for a lane. The scheduler and the vision actor each have at most two running; the rest is for the
/// profile.
const QUEUE: usize = 4;

/// A handle to a lane's thread.
#[derive(Clone)]
pub struct Lane {
    queue: SyncSender<Job>,
    shut_down: Arc<AtomicBool>,
    /// Jobs of serving actors, submitted and not answered.
    under_way: Arc<UnderWay>,
    ended: watch::Receiver<()>,
}

type UnderWay = watch::Sender<usize>;

impl Lane {
    /// Starts a thread that runs jobs on `runner`. The thread ends when the last handle is dropped, or with a panic.
    /// Once the device is past its remaining jobs, they are answered with [`LaneError::Gone`].
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
                // Dropped in reverse order: the device is past all work, then the timeline settles, then the memory
                // goes, and only then is the end announced.
                let _running = running;
                let runner = runner;
                let jobs = jobs;
                Begun::new(&runner, timeline).work(&jobs, &is_shut_down, &counted);
            })
            .expect("the operating system starts a lane's thread");
        Lane { queue, shut_down, under_way, ended }
    }

    /// A lane whose jobs a test runs.
    #[cfg(test)]
    pub(crate) fn by_hand() -> (Lane, std::sync::mpsc::Receiver<Job>) {
        let (queue, jobs) = sync_channel(QUEUE);
        let ended = watch::channel(()).1;
        (Lane { queue, shut_down: Arc::default(), under_way: Arc::new(UnderWay::new(0)), ended }, jobs)
    }

    /// Submits a job. If it cannot be queued, it is answered with an error at once.
    pub fn submit(&self, job: Job) {
        let is_counted = job.is_served();
        // Counted first, because the thread may finish it before this returns.
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

    /// Whether the thread still runs.
    pub fn is_alive(&self) -> bool {
        self.ended.has_changed().is_ok()
    }

    /// Waits until the thread has ended and released its memory. Waiting does not keep the thread alive.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut ended = self.ended.clone();
        async move { while ended.changed().await.is_ok() {} }
    }

    /// Shuts the thread down: it finishes the jobs that it has begun, fails the queued ones, and ends. Waits until it
    /// has released its memory. Required before that memory may be revoked.
    pub async fn shut_down(&self) {
        self.shut_down.store(true, Ordering::Release);
        // If the queue is full, its next job wakes the thread just as well.
        self.submit(Job::Wake);
        self.ended().await;
    }
}
