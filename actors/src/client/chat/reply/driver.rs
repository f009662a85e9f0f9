//! The driver of one request, from its pictures to the last event of the reply. It outlives the
//! actors that it uses.

use bursar_model::{
    flow::{LogProbabilities, LogProbability, POSITION_AXES, Token},
    text::{Detokenizer, ReplyParser, ReplyPart, StopFilter, StopReason, Tokenizer},
};
use ractor::ActorRef;
use tokio::{sync::mpsc, time::Instant};
use tracing::{Span, info, warn};

use super::{ChatEvent, ScoredToken, TokenScore, Usage, answer::Answer, reasoning_count::ReasoningCount};
use crate::{
    chat::{
        ChatError, ModelHandle,
        preparation::{Lead, LeaderRole, Preparation, RequestPictures},
        stopwatch::{Stopwatch, end_of},
    },
    engine::{ModelContext, Serving},
    finish_reason::FinishReason,
    kv::SequenceId,
    metric::RequestEnd,
    order::Priority,
    scheduler::{
        Admission, Delivery, DraftSource, Drafter, Finish, NewSequence, PromptLookup, SchedulerMessage,
        SchedulingParams,
    },
};

/// Maximum deaths of actors that a request survives. After more deaths the request is given up,
/// because the request may itself cause the deaths. The model has a separate limit (`Intensity`,
/// five restarts a minute), which counts the deaths under all requests together.
const DEATHS_MAX: u32 = 2;

/// The `tracing` target of a request's end. Log filters use this name, so the name stays the same
/// if this module moves.
const TARGET: &str = "bursar_actors::chat::driver";

pub(crate) struct Driver {
    model: ModelHandle,
    preparation: Preparation,
    part: LeaderRole,
    /// Group number that all samples of one chat share. `None` for a single sample.
    group: Option<u64>,
    events: mpsc::Sender<Result<ChatEvent, ChatError>>,
    tokenizer: Tokenizer,
    /// Tokens generated so far. They survive the death of every actor.
    produced: Vec<u32>,
    /// Log-probabilities of the prompt so far, one entry per token. `None` if the chat did not ask
    /// for them, or if they have been sent.
    scores: Option<Vec<Option<LogProbabilities>>>,
    /// Prompt tokens found in the prefix cache when the sequence first began.
    cached_tokens: Option<usize>,
    detokenizer: Detokenizer,
    filter: StopFilter,
    parser: ReplyParser,
    answer: Answer,
    reasoning: ReasoningCount,
    /// The end token, if an end token ended the reply.
    end_token: Option<u32>,
    stopwatch: Stopwatch,
    draft_source: Option<DraftSource>,
}

/// How one life of the request ended. A life is the time during which one generation of
/// actors serves the request.
enum Life {
    /// The sequence has ended, and was not canceled.
    Finished(FinishReason),
    /// The caller has disconnected.
    Cancelled,
    /// The actors that served the request died.
    Lost,
}

/// How one admission to the scheduler ended.
enum Ended {
    /// The life of the request has ended too.
    Over(Life),
    /// The sequence must be admitted again, with its pictures.
    Readmit {
        /// Whether the sequence had begun, and then lost its blocks to other sequences.
        had_begun: bool,
    },
}

/// A sequence in a scheduler. Dropping this value, for any reason, cancels the sequence.
struct Admitted {
    scheduler: ActorRef<SchedulerMessage>,
    id: SequenceId,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        // The scheduler ignores unknown sequences, so this message is harmless if the sequence has
        // ended or the scheduler has died.
        drop(self.scheduler.send_message(SchedulerMessage::Cancel(self.id)));
    }
}

impl Driver {
    pub(crate) fn new(
        model: ModelHandle,
        context: &ModelContext,
        preparation: Preparation,
        (part, group): (LeaderRole, Option<u64>),
        events: mpsc::Sender<Result<ChatEvent, ChatError>>,
        stopwatch: Stopwatch,
    ) -> Self {
        let tokenizer = context.prompts.tokenizer().clone();
        Driver {
            model,
            detokenizer: Detokenizer::new(tokenizer.clone(), true).keeping(preparation.reply.tags.iter().copied()),
            tokenizer,
            filter: preparation.stop.filter(),
            parser: preparation.reply.parser.clone(),
            answer: Answer::new(),
            reasoning: ReasoningCount::default(),
            end_token: None,
            scores: preparation.score_prompt.map(|_| vec![None; preparation.prompt.tokens.len()]),
            preparation,
            part,
            group,
            events,
            produced: Vec::new(),
            cached_tokens: None,
            stopwatch,
            draft_source: context.draft_source,
        }
    }

    /// Runs the request to its end. The credit is returned before the caller can see the end, so a
    /// caller that sends one request after another is never refused because of its own previous
    /// request.
    pub(crate) async fn run(mut self, loss: impl Future<Output = ChatError>) {
        let deadlines = self.stopwatch.deadlines().clone();
        let lives = async { deadlines.hold(self.lives()).await.unwrap_or_else(Err) };
        let outcome = tokio::select! {
            biased;
            // The loss is polled first. Otherwise the end of the actors on a lost device would look
            // like an ordinary death.
            lost = loss => Err(lost),
            outcome = lives => outcome,
        };
        let generated_tokens = self.produced.len();
        match &outcome {
            Ok(None) => info!(target: TARGET, generated_tokens, "cancelled"),
            Ok(Some(reason)) => info!(target: TARGET, generated_tokens, ?reason, "ended"),
            Err(error) => {
                warn!(target: TARGET, generated_tokens, %error, "failed");
                self.stopwatch.missed(error);
            }
        }
        let (end, how) = match outcome {
            Ok(None) => return self.stopwatch.end(RequestEnd::Cancelled),
            Ok(Some(finish_reason)) => match self.finish(finish_reason).await {
                Ok(done) => (Ok(done), finish_reason.into()),
                Err(error) => (Err(error.clone()), end_of(&error)),
            },
            Err(error) => (Err(error.clone()), end_of(&error)),
        };
        // If the caller has disconnected, no one reads the end.
        match self.events.reserve().await {
            Ok(place) => {
                self.stopwatch.end(how);
                place.send(end);
            }
            Err(_) => self.stopwatch.end(how),
        }
    }

    /// Repeats lives of the request until the sequence ends by itself. Returns `None` if
    /// the caller has disconnected.
    async fn lives(&mut self) -> Result<Option<FinishReason>, ChatError> {
        let events = self.events.clone();
        let mut lead = tokio::select! {
            lead = self.part.wait() => lead,
            () = events.closed() => return Ok(None),
        };
        if matches!(lead, Some(Lead::GivenUp)) {
            return Err(ChatError::GivenUp { deaths: DEATHS_MAX + 1 });
        }
        if let Some(ids) = self.preparation.prompt_ids.clone()
            && events.send(Ok(ChatEvent::PromptIds(ids))).await.is_err()
        {
            return Ok(None);
        }
        let (mut generation, mut deaths, mut refusals) = (0, 0, None);
        loop {
            let serving = tokio::select! {
                serving = self.model.serving_after(generation) => serving?,
                () = events.closed() => return Ok(None),
            };
            generation = serving.generation;
            // A death that follows a refusal of device memory does not count against this request.
            if refusals.replace(serving.refusals).is_some_and(|before| before < serving.refusals) {
                deaths -= 1;
            }
            if deaths > DEATHS_MAX {
                self.part.announce(|| Lead::GivenUp);
                return Err(ChatError::GivenUp { deaths });
            }
            if self.produced.len() >= self.preparation.tokens_max {
                // The actors died after they delivered the last token and before
                // they reported the end.
                return Ok(Some(FinishReason::Length));
            }
            let pictures = match lead.take() {
                Some(Lead::Computed { generation: of, pictures }) if of == generation => Some(pictures),
                _ => None,
            };
            match self.live(&serving, pictures).await? {
                Life::Finished(reason) => return Ok(Some(reason)),
                Life::Cancelled => return Ok(None),
                Life::Lost => {
                    deaths += 1;
                    info!(target: TARGET, deaths, "repeated because its actors died");
                    self.stopwatch.redo();
                }
            }
        }
    }

    /// Runs one life, with the actors of one generation. `left` contains the pictures that the
    /// first of several samples has shared with this sample, if any.
    async fn live(&mut self, serving: &Serving, mut left: Option<RequestPictures>) -> Result<Life, ChatError> {
        let (events, model) = (self.events.clone(), self.model.clone());
        let (mut id, mut may_be_computed) = (None, true);
        // The loop repeats only after a preemption, and once if cached blocks that the driver
        // relied on are gone. The scheduler bounds preemptions: the request keeps its age, and the
        // oldest request is never preempted.
        loop {
            let pictures = match left.take() {
                Some(pictures) => pictures,
                None => tokio::select! {
                    biased;
                    // Errors from actors that are being replaced do not concern this request.
                    () = model.superseded(serving.generation) => return Ok(Life::Lost),
                    () = events.closed() => return Ok(Life::Cancelled),
                    pictures = self.pictures(serving, may_be_computed) => match pictures? {
                        Some(pictures) => pictures,
                        None => return Ok(Life::Lost),
                    },
                },
            };
            let id = *id.get_or_insert_with(|| model.next_sequence());
            match self.run_sequence(serving, id, pictures).await? {
                Ended::Over(life) => return Ok(life),
                Ended::Readmit { had_begun } => may_be_computed = had_begun,
            }
        }
    }

    /// Runs one sequence from its admission to its end.
    async fn run_sequence(
        &mut self,
        serving: &Serving,
        id: SequenceId,
        pictures: RequestPictures,
    ) -> Result<Ended, ChatError> {
        let sequence = self.sequence(id, &pictures);
        // The scheduler never waits for a caller, so the channel can hold every token, the
        // number of cached tokens, scores sent one by one, and the end or [`Delivery::Readmit`].
        let scores = if self.scores.is_some() { self.preparation.prompt.tokens.len() } else { 0 };
        let capacity = self.preparation.tokens_max - self.produced.len() + 2 + scores;
        let (deliveries, mut delivered) = mpsc::channel(capacity);
        let (pins, computed) = (pictures.pins(), pictures.computed_count());
        // These handles keep the pictures only for the other samples. This sequence releases its
        // own pictures as soon as no step needs them.
        let for_others = Some(pictures).filter(|_| self.part.leads()).unwrap_or_default();
        let last_token = self.stopwatch.last_token();
        let admission = Admission { sequence, pins, deliveries, span: Span::current(), last_token };
        self.stopwatch.queue();
        if serving.scheduler.send_message(SchedulerMessage::Admit(Box::new(admission))).is_err() {
            return Ok(Ended::Over(Life::Lost));
        }
        // This guard is dropped before the sequence is admitted again. By then the scheduler has
        // already forgotten the sequence.
        let _admitted = Admitted { scheduler: serving.scheduler.clone(), id };
        let lead = Lead::Computed { generation: serving.generation, pictures: for_others };
        self.listen(&mut delivered, lead, computed).await
    }

    /// Gets the pictures. Returns `None` if an actor died. Until requested log-probabilities of the
    /// prompt have been sent, the prompt is computed in full, so all its pictures need rows of the
    /// vision cache.
    async fn pictures(
        &mut self,
        serving: &Serving,
        may_be_computed: bool,
    ) -> Result<Option<RequestPictures>, ChatError> {
        let may_be_computed = may_be_computed && self.scores.is_none();
        let had_turn = !self.produced.is_empty();
        let Preparation { prompt, pictures, prefix, scheduling, .. } = &mut self.preparation;
        let rank = Priority { priority: scheduling.priority, tenant: scheduling.tenant.clone(), had_turn };
        RequestPictures::get(serving, pictures, prompt, prefix, may_be_computed, rank).await
    }

    fn sequence(&self, id: SequenceId, pictures: &RequestPictures) -> NewSequence {
        let (prompt, scheduling) = (&self.preparation.prompt, &self.preparation.scheduling);
        let left = self.stopwatch.deadlines().left();
        let produced = self.produced.len() as u32;
        let positions = (0..produced).map(|token| [prompt.next_position + token; POSITION_AXES]);
        let mut sequence = NewSequence {
            id,
            tokens: [&prompt.tokens[..], &self.produced].concat(),
            positions: prompt.positions.iter().copied().chain(positions).collect(),
            next_position: prompt.next_position + produced,
            produced: self.produced.len(),
            tokens_max: self.preparation.tokens_max,
            pictures: pictures.places(&prompt.pictures),
            prefix: self.preparation.prefix.clone(),
            scheduling_params: SchedulingParams {
                priority: scheduling.priority,
                tenant: scheduling.tenant.clone(),
                left,
            },
            group: self.group,
            score_prompt: self.preparation.score_prompt.filter(|_| self.scores.is_some()),
            stop_tokens: self.preparation.stop_tokens.clone(),
            sampler: self.preparation.sampler.clone(),
            prompt_read: self.preparation.prompt_read.clone(),
            drafter: self.drafter(),
        };
        // Hash the blocks here. In the scheduler, all other requests would wait while they are
        // hashed.
        sequence.name_blocks();
        sequence
    }

    /// Creates the drafter, and indexes the prompt for prompt lookup.
    fn drafter(&self) -> Drafter {
        /// Capacity for a reply, in entries. A waiting request should take little memory.
        const REPLY: usize = 1024;
        let prompt = &self.preparation.prompt;
        let sizes = match self.draft_source {
            None => return Drafter::None,
            Some(DraftSource::DraftHead) => return Drafter::DraftHead,
            Some(DraftSource::PromptLookup(sizes)) => sizes,
        };
        let mut lookup = PromptLookup::new(sizes, prompt.tokens.len() + REPLY);
        // A long prompt is indexed here, and not in the scheduler, so that other requests do not
        // wait.
        lookup.extend(&prompt.tokens);
        Drafter::PromptLookup(lookup)
    }

    /// Handles deliveries to a sequence. `computed` is the number of its pictures that need no rows
    /// of the vision cache, because their tokens are in the prefix cache.
    async fn listen(
        &mut self,
        delivered: &mut mpsc::Receiver<Delivery>,
        lead: Lead,
        computed: usize,
    ) -> Result<Ended, ChatError> {
        let events = self.events.clone();
        let (mut lead, mut had_begun) = (Some(lead), false);
        loop {
            let delivery = tokio::select! {
                delivery = delivered.recv() => delivery,
                () = events.closed() => return Ok(Ended::Over(Life::Cancelled)),
            };
            let over = match delivery {
                None => return Ok(Ended::Over(Life::Lost)),
                Some(Delivery::Readmit) => return Ok(Ended::Readmit { had_begun }),
                Some(Delivery::Late(deadline)) => return Err(self.stopwatch.deadlines().error(deadline)),
                Some(Delivery::Begun(tokens)) => {
                    had_begun = true;
                    self.stopwatch.start();
                    if self.cached_tokens.is_none() {
                        self.cached_tokens = Some(tokens);
                        self.stopwatch.found_computed(computed);
                    }
                    continue;
                }
                Some(Delivery::Scores { first, scores }) => {
                    self.keep_scores(first, scores);
                    continue;
                }
                // Any other delivery means that the prompt is computed.
                Some(delivery) => {
                    self.stopwatch.prompt(self.preparation.prompt.tokens.len(), self.cached_tokens.unwrap_or(0));
                    // From now on, the other samples keep the pictures alive.
                    if let Some(lead) = lead.take() {
                        self.part.announce(|| lead);
                    }
                    if !self.tell_scores().await {
                        return Ok(Ended::Over(Life::Cancelled));
                    }
                    match delivery {
                        Delivery::Token(token, at) => self.take(token, at).await?,
                        Delivery::Finished(Finish::Stop(token)) => {
                            self.end_token = Some(token);
                            Some(Life::Finished(FinishReason::Stop))
                        }
                        Delivery::Finished(Finish::Length) => Some(Life::Finished(FinishReason::Length)),
                        Delivery::Finished(Finish::Broken) => return Err(ChatError::NonFiniteLogits),
                        Delivery::Broken(error) => return Err(ChatError::broken(error)),
                        Delivery::Begun(_) | Delivery::Scores { .. } | Delivery::Readmit | Delivery::Late(_) => {
                            unreachable!("these deliveries were handled above")
                        }
                    }
                }
            };
            if let Some(life) = over {
                return Ok(Ended::Over(life));
            }
        }
    }

    /// Handles the next token. Returns how this life ended, if this token ended it.
    async fn take(&mut self, token: Token, at: Instant) -> Result<Option<Life>, ChatError> {
        self.stopwatch.token(at);
        self.produced.push(token.id);
        if self.preparation.prompt_ids.is_some() && self.events.send(Ok(ChatEvent::TokenId(token.id))).await.is_err() {
            return Ok(Some(Life::Cancelled));
        }
        if let Some(scores) = token.log_probabilities {
            let score = readable(&self.tokenizer, &scores)?;
            if self.events.send(Ok(ChatEvent::Token(score))).await.is_err() {
                return Ok(Some(Life::Cancelled));
            }
        }
        let piece = self.detokenizer.feed(token.id)?;
        // A stop string does not end the reply before the reply has its minimum length.
        let (text, stopped) =
            if self.produced.len() < self.preparation.tokens_min { (piece, None) } else { self.filter.feed(&piece) };
        let before = self.parser.place();
        let parts = self.parser.feed(&text);
        self.reasoning.token(before, self.parser.place());
        if !self.say(parts).await {
            return Ok(Some(Life::Cancelled));
        }
        let is_over = stopped.is_some() || self.has_called_enough();
        Ok(is_over.then_some(Life::Finished(FinishReason::Stop)))
    }

    fn keep_scores(&mut self, first: usize, scores: Vec<Option<LogProbabilities>>) {
        if let Some(kept) = &mut self.scores {
            kept[first..first + scores.len()].clone_from_slice(&scores);
        }
    }

    /// Sends the log-probabilities of the prompt, once. Returns whether the
    /// caller is still connected.
    async fn tell_scores(&mut self) -> bool {
        let Some(scores) = self.scores.take() else { return true };
        let tokenizer = self.tokenizer.clone();
        // Decoding thousands of tokens with their alternatives takes too long for an async task.
        let readable = tokio::task::spawn_blocking(move || {
            let readable =
                |scores: Option<LogProbabilities>| scores.and_then(|scores| readable(&tokenizer, &scores).ok());
            scores.into_iter().map(readable).collect()
        });
        let Ok(scores) = readable.await else { return true };
        self.events.send(Ok(ChatEvent::Prompt(scores))).await.is_ok()
    }

    /// Sends parts of the reply, up to the last allowed tool call. Returns whether the
    /// caller is still connected.
    async fn say(&mut self, parts: Vec<ReplyPart>) -> bool {
        for part in parts {
            if self.has_called_enough() {
                break;
            }
            if self.preparation.reply.is_forced && matches!(part, ReplyPart::Text(_)) {
                continue;
            }
            for event in self.answer.take(part) {
                if self.events.send(Ok(event)).await.is_err() {
                    return false;
                }
            }
        }
        true
    }

    /// Returns `true` if the reply has as many complete tool calls as the chat allows. After a
    /// broken call, the model may try again.
    fn has_called_enough(&self) -> bool {
        self.answer.whole_calls() >= self.preparation.reply.calls_max
    }

    async fn finish(&mut self, finish_reason: FinishReason) -> Result<ChatEvent, ChatError> {
        let mut last = self.detokenizer.flush()?;
        if finish_reason == FinishReason::Length {
            // The limit may have cut a character in two. The rest of that character will never be
            // generated.
            last.truncate(last.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        }
        let (mut rest, stopped) = self.filter.feed(&last);
        if stopped.is_none() {
            rest.push_str(&self.filter.flush());
        }
        let mut parts = self.parser.feed(&rest);
        parts.extend(self.parser.finish());
        self.say(parts).await;
        let finish_reason = match finish_reason {
            FinishReason::Length if stopped.is_none() => FinishReason::Length,
            _ if self.answer.calls_tools() => FinishReason::ToolCalls,
            _ => FinishReason::Stop,
        };
        let (usage, end_token) = (self.usage(), self.end_token);
        let stop_reason =
            stopped.or(end_token.filter(|token| self.preparation.is_asked_end(*token)).map(StopReason::Token));
        let Answer { text, reasoning, calls: tool_calls, .. } = std::mem::take(&mut self.answer);
        Ok(ChatEvent::Done { text, reasoning, tool_calls, finish_reason, stop_reason, end_token, usage })
    }

    fn usage(&self) -> Usage {
        let prompt = &self.preparation.prompt;
        Usage {
            prompt_tokens: prompt.tokens.len(),
            picture_tokens: prompt.pictures.iter().map(|span| span.tokens.len()).sum(),
            cached_tokens: self.cached_tokens.unwrap_or(0),
            completion_tokens: self.produced.len(),
            reasoning_tokens: self.reasoning.tokens(),
        }
    }
}

/// Adds the text and bytes of each token to its log-probability.
fn readable(
    tokenizer: &Tokenizer,
    LogProbabilities { chosen, top }: &LogProbabilities,
) -> Result<TokenScore, ChatError> {
    let readable = |scored: &LogProbability| {
        let text = tokenizer.decode(&[scored.id], false)?;
        let bytes = tokenizer.bytes_of(scored.id).unwrap_or_else(|| text.clone().into_bytes());
        Ok(ScoredToken { id: scored.id, text, bytes, log_probability: scored.log_probability })
    };
    Ok(TokenScore { token: readable(chosen)?, top: top.iter().map(readable).collect::<Result<_, ChatError>>()? })
}
