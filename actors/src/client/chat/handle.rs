//! The user's handle to a loaded model.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bursar_budgets::Label;
use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};

use super::ChatError;
use crate::{
    credit::{Credits, NoCredit},
    deadline::Deadlines,
    engine::{Serving, Status},
    kv::SequenceId,
    losses::Losses,
    metric::WakeReason,
    responder::Responder,
    sleep::{Inside, SendSleepOrder, SleepError, SleepLevel, SleepOrder, WakeState, Wakefulness},
    tree,
};

/// Access to a model's sleep state, and to the orders that change it.
#[derive(Clone)]
pub(crate) struct SleepHandle {
    pub(crate) wakefulness: Wakefulness,
    /// How long callers wait for a sleeping model to wake up.
    pub(crate) within: Duration,
    pub(crate) send: SendSleepOrder,
}

/// A handle to a loaded model. Clones refer to the same model. Dropping all handles does not unload
/// the model: it stays loaded until its runtime unloads it.
///
/// ```
/// use bursar_actors::{
///     chat::{Chat, Image},
///     engine::LoadOptions,
///     runtime::{ModelSource, Runtime, RuntimeConfig},
/// };
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = Runtime::start(RuntimeConfig::default()).await?;
/// let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
///
/// let picture = Image::from_bytes(bursar_model::demo::pictures()[1].bytes);
/// let chat = Chat::new().user("What number is written?").image(picture).max_tokens(8);
/// assert_eq!(model.chat(chat.clone()).await?.text().await?, "427");
///
/// let samples = model.samples(chat.temperature(0.7).seed(1), 2).await?;
/// assert_eq!((samples.len(), model.requests()), (2, (2, 16)));
/// # drop(samples);
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ModelHandle {
    pub(super) model: Label,
    status: watch::Receiver<Status>,
    pub(super) credits: Credits,
    sleep: SleepHandle,
    next_sequence: Arc<AtomicU64>,
    /// Default deadlines, for requests that set no deadlines.
    pub(super) deadlines: Deadlines,
    losses: watch::Receiver<Losses>,
    /// Permits for blocking threads that tokenize without generating.
    pub(crate) token_threads: Arc<Semaphore>,
}

/// Maximum threads per model that tokenize, detokenize or render prompts. Further callers wait
/// for a free thread.
const TOKEN_THREADS: usize = 4;

/// Pause before another attempt to wake the model, after an attempt that lacked memory.
const WAKE_AGAIN_AFTER: Duration = Duration::from_secs(1);

impl ModelHandle {
    pub(crate) fn new(
        model: Label,
        status: watch::Receiver<Status>,
        (requests, deadlines): (usize, Deadlines),
        losses: watch::Receiver<Losses>,
        sleep: SleepHandle,
    ) -> Self {
        let credits = Credits::of_requests(requests, model.clone());
        let token_threads = Arc::new(Semaphore::new(TOKEN_THREADS));
        ModelHandle { model, status, credits, sleep, next_sequence: Arc::default(), deadlines, losses, token_threads }
    }

    /// Resolves to an error when the current device is lost.
    pub(super) fn loss(&self) -> impl Future<Output = ChatError> + Send + use<> {
        let mut losses = self.losses.clone();
        let seen = losses.borrow().count;
        async move {
            let lost = losses.wait_for(|losses| losses.count > seen).await.map(|losses| losses.reason.clone());
            match lost {
                Ok(reason) => ChatError::DeviceLost { reason },
                // The runtime has ended. Other code reports that to the request.
                Err(_) => std::future::pending().await,
            }
        }
    }

    /// Puts the model to sleep. A sleeping model holds no lease of device memory. The model wakes
    /// up on [`wake`](Self::wake) or on the next request, which waits until the model is awake.
    /// Running requests end before the model sleeps, and new requests wait. Returns when the memory
    /// is free.
    ///
    /// At [level 1](SleepLevel::Level1) the weights are kept in host memory, which is leased for
    /// them ([`RuntimeConfig::host_bytes`](crate::runtime::RuntimeConfig::host_bytes)). At level 2
    /// they are dropped. At both levels, loaded kernels and the device's context stay in device
    /// memory, as part of the ledger's overhead.
    ///
    /// # Errors
    /// [`SleepError::Busy`] if requests run longer than `within`; the requests continue
    /// and the model stays awake. [`SleepError::Host`] if host memory does not suffice
    /// for level 1. [`SleepError::Stopped`].
    pub async fn sleep(&self, level: SleepLevel, within: Duration) -> Result<(), SleepError> {
        let (reply, answer) = Responder::new();
        (self.sleep.send)(SleepOrder::Sleep { level, within, reply });
        tree::PUT_TO_SLEEP.after(within).wait(answer).await?
    }

    /// Wakes the model if it sleeps, and returns when it accepts requests.
    ///
    /// # Errors
    /// [`SleepError::NotWoken`] if the model cannot start, for example for lack of memory; the
    /// model stays asleep. [`SleepError::TooLate`] after
    /// [`LoadOptions::wake_within`](crate::engine::LoadOptions::wake_within).
    /// [`SleepError::Stopped`].
    pub async fn wake(&self) -> Result<(), SleepError> {
        self.enter(WakeReason::Call).await.map(drop)
    }

    /// Returns the sleep level of a sleeping model. `None` while the model is awake, is still
    /// ending its requests, or wakes up.
    pub fn is_asleep(&self) -> Option<SleepLevel> {
        match self.sleep.wakefulness.state() {
            WakeState::Asleep(level) => Some(level),
            WakeState::Awake | WakeState::Draining | WakeState::Waking => None,
        }
    }

    /// Waits until the model is awake, and keeps the model awake while the returned value exists.
    /// If a request cannot wake the model for lack of memory, the wake-up is tried again until the
    /// time limit of `wake_within`.
    pub(super) async fn enter(&self, reason: WakeReason) -> Result<Inside, SleepError> {
        let SleepHandle { wakefulness, within, send } = &self.sleep;
        let mut lacked = None;
        let tries = async {
            loop {
                let failure = match wakefulness.enter_awake(|| send(SleepOrder::Wake(reason))).await {
                    Err(failure) if failure.lacks_memory && reason == WakeReason::Request => failure,
                    entered => return entered,
                };
                lacked = Some(failure);
                tokio::time::interval_at(Instant::now() + WAKE_AGAIN_AFTER, WAKE_AGAIN_AFTER).tick().await;
            }
        };
        let awake = tokio::time::timeout(*within, tries);
        let mut status = self.status.clone();
        let over = async {
            match status.wait_for(Status::is_over).await.map(|status| status.clone()) {
                Ok(Status::Stopped { reason }) => reason,
                Ok(Status::Failed(error)) => error.to_string().into(),
                _ => "the runtime has ended".into(),
            }
        };
        tokio::select! {
            biased;
            inside = awake => match inside {
                Ok(entered) => Ok(entered?),
                Err(_) => Err(lacked.map_or(SleepError::TooLate { within: *within }, SleepError::NotWoken)),
            },
            reason = over => Err(SleepError::Stopped { reason }),
        }
    }

    /// Returns the actors that currently serve, so that the caller can ask, monitor, link or kill
    /// them. Waits while they are being replaced. If the model sleeps, returns the actors that
    /// served last.
    ///
    /// Monitor with `mine.monitor(theirs)`. Link with `mine.link(theirs)`, which ends your actor
    /// together with theirs. Do not call `theirs.link(mine)`: an actor has only one supervisor, so
    /// that call takes the actor away from the engine, which then cannot replace it.
    ///
    /// # Errors
    /// [`ChatError::NotStarted`] or [`ChatError::Stopped`].
    pub async fn serving(&self) -> Result<Serving, ChatError> {
        self.serving_after(0).await
    }

    /// Waits for serving actors of a later [`generation`](Serving::generation) than this one, such
    /// as the successors of actors that died.
    ///
    /// # Errors
    /// See [`serving`](ModelHandle::serving).
    pub async fn serving_after(&self, generation: u64) -> Result<Serving, ChatError> {
        let mut status = self.status.clone();
        let is_settled = |status: &Status| match status {
            Status::Starting | Status::NotWoken(_) => false,
            Status::Ready(serving) => serving.generation > generation,
            Status::Failed(_) | Status::Stopped { .. } => true,
        };
        let settled = status.wait_for(is_settled).await.map(|status| status.clone());
        match settled {
            Ok(Status::Ready(serving)) => Ok(serving),
            Ok(Status::Failed(error)) => Err(ChatError::NotStarted(error)),
            Ok(Status::Stopped { reason }) => Err(ChatError::Stopped { reason }),
            Ok(Status::Starting | Status::NotWoken(_)) => unreachable!("the other states are not waited for"),
            Err(_) => Err(ChatError::Stopped { reason: "the runtime has ended".into() }),
        }
    }

    /// Waits until the actors of `generation` no longer serve or are about to stop.
    pub(crate) async fn superseded(&self, generation: u64) {
        let mut status = self.status.clone();
        let is_other = |status: &Status| match status {
            Status::Ready(serving) => serving.generation != generation,
            Status::Starting | Status::NotWoken(_) | Status::Failed(_) | Status::Stopped { .. } => true,
        };
        // An error means that the runtime has ended, so no actors serve.
        drop(status.wait_for(is_other).await);
    }

    /// Returns the error for a request that got no credit.
    pub(super) fn refused(&self, refusal: NoCredit) -> ChatError {
        match (refusal, &*self.status.borrow()) {
            (NoCredit::Full, _) => ChatError::Overloaded { limit: self.credits.limit() },
            (NoCredit::Closed, Status::Failed(error)) => ChatError::NotStarted(error.clone()),
            (NoCredit::Closed, Status::Stopped { reason }) => ChatError::Stopped { reason: reason.clone() },
            (NoCredit::Closed, Status::Starting | Status::NotWoken(_) | Status::Ready(_)) => ChatError::ShuttingDown,
        }
    }

    pub(crate) fn credits(&self) -> &Credits {
        &self.credits
    }

    /// The model's name in its runtime.
    pub fn name(&self) -> String {
        self.model.to_string()
    }

    /// Number of requests that run or wait, and the maximum.
    pub fn requests(&self) -> (usize, usize) {
        (self.credits.taken(), self.credits.limit())
    }

    pub(crate) fn next_sequence(&self) -> SequenceId {
        SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed) + 1)
    }
}
