//! Acceptance of a chat: its credits, its preparation, and the start of a driver for each reply.

use std::sync::{Arc, LazyLock};

use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};
use tracing::{Instrument, Span, field::Empty, info_span, warn};

use super::{
    Chat, ChatError, ModelHandle, Reply,
    preparation::{LeaderRole, Preparation},
    reply::Driver,
    stopwatch::{Stopwatch, count_missed, end_of},
    timeout::DeadlineTracker,
};
use crate::{
    engine::ModelContext,
    kv::SequenceId,
    metric::{self, WakeReason},
};

/// Maximum characters of an error that are logged.
const ERROR_CHARACTERS: usize = 512;

/// A chat with more bytes of text than this limit counts as long; see [`LONG_CHATS`].
const LONG_CHAT_BYTES: usize = 256 << 10;

/// Permits to prepare long chats, shared by all models: one per CPU.
static LONG_CHATS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)));

/// Number of events that a driver may send before its caller reads them. A slow caller delays only
/// its own reply.
const EVENTS_AHEAD: usize = 64;

impl ModelHandle {
    /// Sends a chat to the model, and returns its reply as a stream of events.
    ///
    /// # Errors
    /// Anything outside the envelope is refused before the request is queued, with the limit, the
    /// value and a hint.
    /// [`ChatError::Overloaded`] if the limit of requests that run or wait has been reached.
    /// [`ChatError::ShuttingDown`] if the model only waits for running requests to end.
    /// [`ChatError::Asleep`] if the model sleeps and could not be woken. Later errors arrive as the
    /// last event of the reply.
    pub async fn chat(&self, chat: Chat) -> Result<Reply, ChatError> {
        let mut replies = self.samples(chat, 1).await?;
        Ok(replies.pop().expect("one sample has one reply"))
    }

    /// Sends a chat and returns several replies to it. The first sample computes the prompt, and
    /// all samples share its whole KV blocks. Each sample counts as a separate request and has its
    /// own reply. Each sample's seed is one higher than the seed before it, so a sample equals the
    /// reply of [`chat`](ModelHandle::chat) with that seed, except for rounding on a GPU (see
    /// [`Chat::seed`]). Log-probabilities of the prompt are sent only with the first sample.
    ///
    /// # Errors
    /// See [`chat`](ModelHandle::chat). Also [`ChatError::Samples`] for zero samples, or for more
    /// samples than the limit of requests that run or wait.
    pub async fn samples(&self, chat: Chat, samples: usize) -> Result<Vec<Reply>, ChatError> {
        let id = self.next_sequence();
        let span = self.span(id);
        let accepted = self.accept(chat, samples, span.clone()).instrument(span.clone()).await;
        accepted.inspect_err(|error| {
            // The message repeats the id, because the span is absent if only warnings are recorded.
            // The text is cut because it may contain a name that the caller chose, such as a
            // tool's.
            let message: String = error.to_string().chars().take(ERROR_CHARACTERS).collect();
            span.in_scope(|| warn!(id = id.0, reason = end_of(error).name(), error = message, "refused"));
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
        let tracker = DeadlineTracker::new(asked, chat.scheduling.deadlines.or(self.deadlines));
        let begin = |credit| Stopwatch::begin(self.model.clone(), credit, tracker.of_sample(), asked);
        let prepared = self.prepared(chat, credits.into_iter().map(begin).collect());
        let prepared = tracker.hold(prepared).await;
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

    /// Counts requests that were not accepted because of `error`, and returns the error.
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
            Some(LONG_CHATS.acquire().await.expect("the semaphore is never closed"))
        } else {
            None
        };
        // Templates, tokenizers and grammars are slow, so a blocking thread prepares the chat. The
        // thread continues even if the caller disconnects. It therefore holds the credits, which
        // limits the number of these threads to the number of requests.
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
}
