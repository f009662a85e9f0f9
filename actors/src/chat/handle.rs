//! A loaded model, as users hold it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bursar_budgets::Label;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tracing::{Instrument, Span, field::Empty, info_span, warn};

use super::{
    Chat, ChatError, Reply,
    driver::{Deadline, Driver},
    lead::Part,
    preparation::Preparation,
    stopwatch::{Stopwatch, end_of},
};
use crate::{
    credit::{Credits, NoCredit},
    engine::{ModelContext, Serving, Status},
    kv::SequenceId,
    losses::Losses,
    metric,
};

/// A loaded model. Cloning shares it; the model stays loaded until its runtime unloads it.
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
    next_sequence: Arc<AtomicU64>,
    losses: watch::Receiver<Losses>,
}

/// Events that a driver may be ahead of its caller. A slower caller holds its own reply back and nobody else's.
const EVENTS_AHEAD: usize = 64;

impl ModelHandle {
    pub(crate) fn new(
        model: Label,
        status: watch::Receiver<Status>,
        requests: usize,
        losses: watch::Receiver<Losses>,
    ) -> Self {
        let credits = Credits::of_requests(requests, model.clone());
        ModelHandle { model, status, credits, next_sequence: Arc::default(), losses }
    }

    /// Comes to an error when the device is lost that is there now.
    pub(super) fn loss(&self) -> impl Future<Output = ChatError> + Send + use<> {
        let mut losses = self.losses.clone();
        let seen = losses.borrow().count;
        async move {
            let lost = losses.wait_for(|losses| losses.count > seen).await.map(|losses| losses.reason.clone());
            match lost {
                Ok(reason) => ChatError::DeviceLost { reason },
                // The runtime is gone, and others say so.
                Err(_) => std::future::pending().await,
            }
        }
    }

    /// Asks the model.
    ///
    /// # Errors
    /// At once, with the limit, the value and a hint, whatever is outside the envelope; [`ChatError::Overloaded`] when
    /// as many requests are under way as may be, [`ChatError::ShuttingDown`] when the model only waits for those to end.
    /// What goes wrong later comes as the reply's last event.
    pub async fn chat(&self, chat: Chat) -> Result<Reply, ChatError> {
        let mut replies = self.samples(chat, 1).await?;
        Ok(replies.pop().expect("one sample is one reply"))
    }

    /// Asks the model once and takes several replies. They share their prompt: it is computed by the first, and its
    /// blocks of keys and values are there once. Each sample is a request and a reply of its own; the seed of each is
    /// one more than that of the one before, so that each is what [`chat`](ModelHandle::chat) with that seed gives.
    /// Log-probabilities of the prompt come with the first.
    ///
    /// # Errors
    /// As [`chat`](ModelHandle::chat), and [`ChatError::Samples`] for none or for more than may be under way.
    pub async fn samples(&self, chat: Chat, samples: usize) -> Result<Vec<Reply>, ChatError> {
        let id = self.next_sequence().0;
        let span = self.span(id);
        let accepted = self.accept(chat, samples, span.clone()).instrument(span.clone()).await;
        accepted.inspect_err(|error| {
            // With its id: where only warnings are told the span is not.
            span.in_scope(|| warn!(id, reason = end_of(error).name(), %error, "refused"));
        })
    }

    /// A request: all that is told of it, by any actor, is told in here.
    fn span(&self, id: u64) -> Span {
        info_span!("request", id, model = %self.model, prompt_tokens = Empty, files = Empty)
    }

    /// Starts the drivers of samples; `first` is the span of the first of them.
    async fn accept(&self, chat: Chat, samples: usize, first: Span) -> Result<Vec<Reply>, ChatError> {
        let asked = Instant::now();
        let limit = self.credits.limit();
        if samples == 0 || samples > limit {
            return Err(self.turned_away(1, ChatError::Samples { samples, limit }));
        }
        let credits = self.credits.take(samples);
        let credits = credits.map_err(|refusal| self.turned_away(samples, self.refused(refusal)))?;
        // From here on a loss is theirs, also while they are prepared.
        let losses: Vec<_> = (0..samples).map(|_| self.loss()).collect();
        let deadline = chat.generation.deadline.map(Deadline::after);
        let begin = |credit| Stopwatch::begin(self.model.clone(), credit, deadline, asked);
        let prepared = self.prepared(chat, credits.into_iter().map(begin).collect());
        let (context, prepared, stopwatches) = match deadline {
            Some(deadline) => deadline.hold(prepared).await??,
            None => prepared.await?,
        };
        let group = (samples > 1).then(|| self.next_sequence().0);
        let drivers = prepared.into_iter().zip(Part::of(samples)).zip(stopwatches.into_iter().zip(losses));
        let mut first = Some(first);
        let replies = drivers.map(|((preparation, part), (stopwatch, loss))| {
            let (events, reply) = mpsc::channel(EVENTS_AHEAD);
            let span = first.take().unwrap_or_else(|| self.span(self.next_sequence().0));
            span.record("prompt_tokens", preparation.prompt.tokens.len());
            span.record("files", preparation.pictures.len());
            let driver = Driver::new(self.clone(), &context, preparation, (part, group), events, stopwatch);
            tokio::spawn(driver.run(deadline, loss).instrument(span));
            Reply::new(reply)
        });
        Ok(replies.collect())
    }

    /// So many requests were not accepted, for this.
    fn turned_away(&self, requests: usize, error: ChatError) -> ChatError {
        metric::REQUESTS_TOTAL.add(&(self.model.clone(), end_of(&error)), requests);
        error
    }

    async fn prepared(
        &self,
        chat: Chat,
        stopwatches: Vec<Stopwatch>,
    ) -> Result<(Arc<ModelContext>, Vec<Preparation>, Vec<Stopwatch>), ChatError> {
        let end_all = |stopwatches: Vec<Stopwatch>, error: ChatError| {
            stopwatches.into_iter().for_each(|stopwatch| stopwatch.end(end_of(&error)));
            error
        };
        let serving = match self.serving().await {
            Ok(serving) => serving,
            Err(error) => return Err(end_all(stopwatches, error)),
        };
        let kv_tokens = serving.record.kv_tokens();
        let (context, for_preparation) = (serving.context.clone(), serving.context.clone());
        // Templates, tokenizers and grammars take their time. The credits are the thread's meanwhile: it goes on though
        // nobody waits for it any more, and such threads are as many as requests may be.
        let prepare = move || match Preparation::of(&chat, &for_preparation, kv_tokens, stopwatches.len()) {
            Ok(prepared) => Ok((prepared, stopwatches)),
            Err(error) => Err(end_all(stopwatches, error)),
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        let (prepared, stopwatches) = prepared.map_err(|_| ChatError::PreparationDied)??;
        Ok((context, prepared, stopwatches))
    }

    /// The actors that serve now: to ask them, to watch them, to link yours to them, or to kill them. Waits while they are
    /// being replaced.
    ///
    /// Watch with `mine.monitor(theirs)`, and link with `mine.link(theirs)`, which ends yours with theirs. An actor has
    /// one supervisor: `theirs.link(mine)` would take it from the engine, which could no longer replace it.
    ///
    /// # Errors
    /// [`ChatError::NotStarted`] or [`ChatError::Stopped`].
    pub async fn serving(&self) -> Result<Serving, ChatError> {
        self.serving_after(0).await
    }

    /// The actors that serve, of a later [`generation`](Serving::generation) than this: the successors of dead ones, as
    /// soon as they are there.
    ///
    /// # Errors
    /// As [`serving`](ModelHandle::serving).
    pub async fn serving_after(&self, generation: u64) -> Result<Serving, ChatError> {
        let mut status = self.status.clone();
        let is_settled = |status: &Status| match status {
            Status::Starting => false,
            Status::Ready(serving) => serving.generation > generation,
            Status::Failed(_) | Status::Stopped { .. } => true,
        };
        let settled = status.wait_for(is_settled).await.map(|status| status.clone());
        match settled {
            Ok(Status::Ready(serving)) => Ok(serving),
            Ok(Status::Failed(error)) => Err(ChatError::NotStarted(error)),
            Ok(Status::Stopped { reason }) => Err(ChatError::Stopped { reason }),
            Ok(Status::Starting) => unreachable!("waited for something else"),
            Err(_) => Err(ChatError::Stopped { reason: "the runtime is gone".into() }),
        }
    }

    /// Returns when the actors of `generation` serve no longer, or are about not to.
    pub(super) async fn superseded(&self, generation: u64) {
        let mut status = self.status.clone();
        let is_other = |status: &Status| match status {
            Status::Ready(serving) => serving.generation != generation,
            Status::Starting | Status::Failed(_) | Status::Stopped { .. } => true,
        };
        // A runtime that is gone serves nothing either.
        drop(status.wait_for(is_other).await);
    }

    fn refused(&self, refusal: NoCredit) -> ChatError {
        match (refusal, &*self.status.borrow()) {
            (NoCredit::Full, _) => ChatError::Overloaded { limit: self.credits.limit() },
            (NoCredit::Closed, Status::Failed(error)) => ChatError::NotStarted(error.clone()),
            (NoCredit::Closed, Status::Stopped { reason }) => ChatError::Stopped { reason: reason.clone() },
            (NoCredit::Closed, Status::Starting | Status::Ready(_)) => ChatError::ShuttingDown,
        }
    }

    /// Its requests, as the runtime counts them.
    pub(crate) fn credits(&self) -> &Credits {
        &self.credits
    }

    /// Requests under way or waiting, and how many there may be.
    pub fn requests(&self) -> (usize, usize) {
        (self.credits.taken(), self.credits.limit())
    }

    pub(super) fn next_sequence(&self) -> SequenceId {
        SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed) + 1)
    }
}
