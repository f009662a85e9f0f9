//! The user's handle to a loaded model.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bursar_budgets::Label;
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::Instant,
};
use tracing::{Instrument, Span, field::Empty, info_span, warn};

use super::{
    Chat, ChatError, Reply,
    driver::Driver,
    preparation::Preparation,
    prompt_leader::LeaderRole,
    stopwatch::{Stopwatch, count_missed, end_of},
    timeout::Patience,
    tokens::TOKEN_THREADS,
};
use crate::{
    credit::{Credits, NoCredit},
    deadline::Deadlines,
    engine::{ModelContext, Serving, Status},
    kv::SequenceId,
    losses::Losses,
    metric::{self, WakeReason},
    responder::Responder,
    sleep::{Inside, Rest, SendSleepOrder, SleepError, SleepLevel, SleepOrder, Wakefulness},
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

/// A handle to a loaded model. Clones refer to the same model, which stays loaded until
/// its runtime unloads it.
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
    model: Label,
    status: watch::Receiver<Status>,
    credits: Credits,
    sleep: SleepHandle,
    next_sequence: Arc<AtomicU64>,
    /// Default deadlines, for requests that set no deadlines.
    deadlines: Deadlines,
    losses: watch::Receiver<Losses>,
    /// Permits for blocking threads that tokenize without generating.
    pub(super) token_threads: Arc<Semaphore>,
}

/// Pause before another attempt to wake the model, after an attempt that lacked memory.
const WAKE_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Maximum characters of an error that are logged.
const ERROR_CHARACTERS: usize = 512;

/// A chat with more bytes of text than this counts as long; see [`LONG_CHATS`].
const LONG_CHAT_BYTES: usize = 256 << 10;

/// Permits to prepare long chats, shared by all models: one per CPU.
static LONG_CHATS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)));

/// Number of events that a driver may send ahead of its caller. A slow caller delays
/// only its own reply.
const EVENTS_AHEAD: usize = 64;

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

    /// Sends a chat to the model.
    ///
    /// # Errors
    /// Anything outside the envelope is refused immediately, with the limit, the value and a hint.
    /// [`ChatError::Overloaded`] if the limit of requests that run or wait has been reached.
    /// [`ChatError::ShuttingDown`] if the model only waits for running requests to end.
    /// [`ChatError::Asleep`] if the model sleeps and could not be woken. Later errors arrive as the
    /// last event of the reply.
    pub async fn chat(&self, chat: Chat) -> Result<Reply, ChatError> {
        let mut replies = self.samples(chat, 1).await?;
        Ok(replies.pop().expect("one sample is one reply"))
    }

    /// Sends a chat and returns several replies that share the prompt. The first sample computes
    /// the prompt, and its KV blocks exist only once. Each sample counts as a separate request and
    /// has its own reply. Each sample's seed is one higher than the seed before it, so a sample
    /// equals the reply of [`chat`](ModelHandle::chat) with that seed. Log-probabilities of the
    /// prompt are sent only with the first sample.
    ///
    /// # Errors
    /// See [`chat`](ModelHandle::chat). Also [`ChatError::Samples`] for zero samples, or for more
    /// samples than the limit of requests that run or wait.
    pub async fn samples(&self, chat: Chat, samples: usize) -> Result<Vec<Reply>, ChatError> {
        let id = self.next_sequence();
        let span = self.span(id);
        let accepted = self.accept(chat, samples, span.clone()).instrument(span.clone()).await;
        accepted.inspect_err(|error| {
            // Includes the id, because the span is absent if only warnings are recorded. The text
            // is shortened because it may contain a name that the caller chose, such as a tool's.
            let told: String = error.to_string().chars().take(ERROR_CHARACTERS).collect();
            span.in_scope(|| warn!(id = id.0, reason = end_of(error).name(), error = told, "refused"));
        })
    }

    /// Creates the span of a request, in which every actor records its events.
    fn span(&self, id: SequenceId) -> Span {
        info_span!("request", id = id.0, model = %self.model, prompt_tokens = Empty, files = Empty)
    }

    /// Starts the drivers of the samples. `first` is the span of the first sample.
    async fn accept(&self, chat: Chat, samples: usize, first: Span) -> Result<Vec<Reply>, ChatError> {
        let asked = Instant::now();
        let limit = self.credits.limit();
        if samples == 0 || samples > limit {
            return Err(self.turned_away(1, ChatError::Samples { samples, limit }));
        }
        let credits = self.credits.take(samples);
        let credits = credits.map_err(|refusal| self.turned_away(samples, self.refused(refusal)))?;
        // Watch for device loss from here on, so that a loss during preparation is noticed too.
        let losses: Vec<_> = (0..samples).map(|_| self.loss()).collect();
        let patience = Patience::new(asked, chat.standing.deadlines.or(self.deadlines));
        let begin = |credit| Stopwatch::begin(self.model.clone(), credit, patience.of_sample(), asked);
        let prepared = self.prepared(chat, credits.into_iter().map(begin).collect());
        let prepared = patience.hold(prepared).await;
        let (context, prepared, stopwatches) =
            prepared.inspect_err(|error| count_missed(&self.model, error, samples))??;
        let group = (samples > 1).then(|| self.next_sequence().0);
        let drivers = prepared.into_iter().zip(LeaderRole::of(samples)).zip(stopwatches.into_iter().zip(losses));
        let mut first = Some(first);
        let replies = drivers.map(|((preparation, part), (stopwatch, loss))| {
            let (events, reply) = mpsc::channel(EVENTS_AHEAD);
            let span = first.take().unwrap_or_else(|| self.span(self.next_sequence()));
            span.record("prompt_tokens", preparation.prompt.tokens.len());
            span.record("files", preparation.pictures.len());
            let driver = Driver::new(self.clone(), &context, preparation, (part, group), events, stopwatch);
            tokio::spawn(driver.run(loss).instrument(span));
            Reply::new(reply)
        });
        Ok(replies.collect())
    }

    /// Counts requests that were not accepted because of `error`.
    fn turned_away(&self, requests: usize, error: ChatError) -> ChatError {
        metric::REQUESTS_TOTAL.add(&(self.model.clone(), end_of(&error)), requests);
        error
    }

    async fn prepared(
        &self,
        chat: Chat,
        mut stopwatches: Vec<Stopwatch>,
    ) -> Result<(Arc<ModelContext>, Vec<Preparation>, Vec<Stopwatch>), ChatError> {
        let end_all = |stopwatches: Vec<Stopwatch>, error: ChatError| {
            stopwatches.into_iter().for_each(|stopwatch| stopwatch.end(end_of(&error)));
            error
        };
        let awake = async {
            let inside = Arc::new(self.enter(WakeReason::Request).await.map_err(ChatError::from)?);
            Ok((inside, self.serving().await?))
        };
        let (inside, serving) = match awake.await {
            Ok(awake) => awake,
            Err(error) => return Err(end_all(stopwatches, error)),
        };
        stopwatches.iter_mut().for_each(|stopwatch| stopwatch.let_in(inside.clone()));
        let kv_tokens = serving.record.kv_tokens();
        let (context, for_preparation) = (serving.context.clone(), serving.context.clone());
        // Preparing a long chat copies it, so at most one long chat per CPU is prepared at a time.
        // Short chats do not wait.
        let turn = if chat.text_bytes() > LONG_CHAT_BYTES {
            Some(LONG_CHATS.acquire().await.expect("it is never closed"))
        } else {
            None
        };
        // Templates, tokenizers and grammars are slow, so a blocking thread prepares the chat. The
        // thread continues even if the caller disconnects, so it holds the credits. That limits the
        // number of these threads to the number of requests.
        let prepare = move || match Preparation::of(&chat, &for_preparation, kv_tokens, stopwatches.len()) {
            Ok(prepared) => Ok((prepared, stopwatches)),
            Err(error) => Err(end_all(stopwatches, error)),
        };
        let prepared = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            prepare()
        });
        let prepared = prepared.await;
        let (prepared, stopwatches) = prepared.map_err(|_| ChatError::PreparationDied)??;
        Ok((context, prepared, stopwatches))
    }

    /// Puts the model to sleep. A sleeping model holds no device memory. It wakes up on
    /// [`wake`](Self::wake), or on the next request, which waits for it. Running requests end
    /// before the model sleeps, and new requests wait. Returns when the memory is free.
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
        match self.sleep.wakefulness.rest() {
            Rest::Asleep(level) => Some(level),
            Rest::Awake | Rest::Draining | Rest::Waking => None,
        }
    }

    /// Waits until the model is awake, and keeps the model awake while the returned value exists.
    /// If a request cannot wake the model for lack of memory, the wake-up is tried again until the
    /// time limit of `wake_within`.
    async fn enter(&self, reason: WakeReason) -> Result<Inside, SleepError> {
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

    /// Returns the actors that currently serve, so that the caller can ask, monitor, link or
    /// kill them. Waits while they are being replaced. If the model sleeps, these are the
    /// actors that served last.
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

    /// Waits for serving actors of a later [`generation`](Serving::generation) than this one: the
    /// successors of actors that died.
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
            Ok(Status::Starting | Status::NotWoken(_)) => unreachable!("waited for something else"),
            Err(_) => Err(ChatError::Stopped { reason: "the runtime has ended".into() }),
        }
    }

    /// Waits until the actors of `generation` no longer serve or are about to stop.
    pub(super) async fn superseded(&self, generation: u64) {
        let mut status = self.status.clone();
        let is_other = |status: &Status| match status {
            Status::Ready(serving) => serving.generation != generation,
            Status::Starting | Status::NotWoken(_) | Status::Failed(_) | Status::Stopped { .. } => true,
        };
        // An error means that the runtime has ended, so no actors serve.
        drop(status.wait_for(is_other).await);
    }

    fn refused(&self, refusal: NoCredit) -> ChatError {
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

    pub(super) fn next_sequence(&self) -> SequenceId {
        SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed) + 1)
    }
}
