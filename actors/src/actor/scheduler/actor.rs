//! The scheduler actor: a thin shell around its core.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use bursar_budgets::{Bytes, Label};
use bursar_kernels::BLOCK_TOKENS;
use bursar_model::{
    error::SamplingError,
    flow::{CacheGroups, DraftPositions, Token},
    sampling::Score,
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tracing::{Level, Span, debug, enabled};

use super::{
    Admission, ChosenRows, Delivery, Effect, Input, Limits, Preemptions, SchedulerCore, SchedulerMessage, Scored,
    StepPlan, late_tokens::Delays,
};
use crate::{
    budget::{KvDemand, SharedKvDemand},
    compute::lane::{
        Acceptance, Answer, Choice, Copied, CopyJob, Job, Lane, PastTokens, RefusalSink, StepJob, Stepped,
    },
    kv::{BlockLog, Copies, KvUse, SequenceId, StateUse},
    metric::{self, CacheGroupIndex, Direction, DraftPosition, Permit, Preempted},
    responder::Responder,
    tenant::TenantWeights,
    token_interval::Pacing,
    vision::PinnedSet,
};

/// The `tracing` target of events about a request's steps. Log filters use this name, so the name
/// must not change when this module moves.
const TARGET: &str = "bursar_actors::scheduler::actor";

/// The time that the second step of a burst waits for the other prompts of the burst. The
/// resolution of the timer makes the actual wait one to two milliseconds. For comparison, a first
/// step with a prompt of 512 tokens takes eleven milliseconds with a 7B-sized model on an H200.
const GATHERING: Duration = Duration::from_millis(1);

/// The actor that runs steps as long as there are sequences.
pub struct SchedulerActor;

pub struct SchedulerArguments {
    /// The permits of the profile record.
    pub limits: Limits,
    /// The model's attention layers, in groups that share block tables.
    pub cache_groups: CacheGroups,
    pub lane: Lane,
    /// The model's label in metrics.
    pub model: Label,
    /// Bytes of one block over all layers, for metrics.
    pub block_bytes: Bytes,
    /// Called if a step or copy is refused memory. The call makes the engine replace this actor.
    pub refused: RefusalSink,
    /// The promised token interval, and the costs used to keep it.
    pub pacing: Pacing,
    pub tenant_weights: TenantWeights,
    /// Blocks that fit in host memory. 0 means no host tier.
    pub host_slots: usize,
    /// Whether each sequence has as many drafts as the limits allow, even if fewer would be faster.
    pub has_fixed_drafts: bool,
    /// The probability with which each draft is accepted, if drafts are not compared with the
    /// sampler's choices.
    pub synthetic_acceptance: Option<f64>,
    /// The positions of the draft head's drafts, if the model was loaded with a draft head.
    pub draft_head: Option<DraftPositions>,
    /// See [`FamilyConfig::whole_picture_tokens`](bursar_model::registry::FamilyConfig::whole_picture_tokens).
    pub whole_picture_tokens: usize,
    /// Slots for recurrent states; 0 for a model whose layers are all attention.
    pub state_slots: usize,
    /// Snapshots of states that fit in host memory. 0 means that evicted snapshots are lost.
    pub host_states: usize,
    /// Bytes of one state over all layers. 0 without recurrent states.
    pub state_bytes: Bytes,
    /// The shared value to which this actor writes the model's demand for blocks. `None` if the
    /// model neither lends nor borrows blocks.
    pub demand: Option<Arc<SharedKvDemand>>,
    /// The channel on which this actor publishes the usage of the blocks.
    pub kv_use: watch::Sender<KvUse>,
    /// The log to which this actor writes the events of blocks in the prefix cache.
    pub block_log: Arc<BlockLog>,
}

pub struct SchedulerState {
    core: SchedulerCore,
    callers: BTreeMap<SequenceId, Caller>,
    arguments: SchedulerArguments,
    /// Steps that were submitted to the lane, the oldest first.
    under_way: VecDeque<UnderWay>,
    /// When the scheduler began. The core's clock starts at this time.
    began: Instant,
    /// The time until which the model counts as waiting for blocks.
    waiting_until: Option<Instant>,
    /// When the last step ended.
    stepped_at: Instant,
    /// Counts since the last [`count`](Self::count).
    counted: Counted,
    /// `true` once a step or copy was refused memory. The engine has been informed, and is about to
    /// replace this actor.
    is_refused: bool,
    /// The tokens of the step that just ended, with the details that the core does not need.
    chosen: BTreeMap<SequenceId, VecDeque<Result<Token, SamplingError>>>,
    /// Pending replies to changes of the pool's size.
    resizing: Vec<Responder<()>>,
    /// The latest events that may have delayed tokens.
    delays: Delays<Instant>,
}

/// A step that was submitted to the lane and has not ended.
struct UnderWay {
    has_prompts: bool,
    /// Whether pictures were being encoded when the step was planned.
    encodes: bool,
    /// The sequences that choose tokens.
    rows: Vec<ChosenRows>,
    /// The prompt tokens that the step scores.
    scored: Vec<Scored>,
    launched: Instant,
}

/// Counters that are recorded once per message instead of once per sequence, because a step has
/// hundreds of sequences.
#[derive(Default)]
struct Counted {
    generated: usize,
    /// Tokens of sequences that began. All of them were looked up in the prefix cache.
    sought: usize,
    /// Tokens of `sought` that were cached.
    found: usize,
    /// The core's preemptions when they were last recorded.
    preempted: Preemptions,
}

/// The caller of a sequence, and the resources held for it.
struct Caller {
    /// `None` once the caller has disconnected.
    deliveries: Option<mpsc::Sender<Delivery>>,
    /// The sequence's pictures. `None` once no later step reads them.
    pins: Option<Arc<PinnedSet>>,
    span: Span,
    /// Whether a step with the sequence has been planned.
    has_begun: bool,
    /// When the sequence's latest token was ready.
    last_token: Option<Instant>,
    /// Whether the sequence has lost its blocks since its latest token.
    was_preempted: bool,
}

impl Actor for SchedulerActor {
    type Msg = SchedulerMessage;
    type State = SchedulerState;
    type Arguments = SchedulerArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<SchedulerMessage>,
        arguments: SchedulerArguments,
    ) -> Result<SchedulerState, ActorProcessingErr> {
        myself.send_message(SchedulerMessage::Show)?;
        for tenant in arguments.tenant_weights.tenants() {
            metric::TENANT_TOKENS_TOTAL.add(&(arguments.model.clone(), tenant.clone()), 0);
        }
        Ok(SchedulerState {
            core: SchedulerCore::new(arguments.limits)
                .with_groups(arguments.cache_groups.clone())
                .with_whole_pictures(arguments.whole_picture_tokens)
                .with_token_interval(arguments.pacing.token_interval())
                .with_tenants(arguments.tenant_weights.clone())
                .with_fixed_drafts(arguments.has_fixed_drafts)
                .with_draft_head(arguments.draft_head)
                .with_states(arguments.state_slots)
                .with_host(arguments.host_slots, arguments.pacing.copy_costs())
                .with_host_states(
                    arguments.host_states,
                    arguments.state_bytes.div_ceil(arguments.block_bytes) as usize,
                ),
            callers: BTreeMap::new(),
            arguments,
            under_way: VecDeque::new(),
            began: Instant::now(),
            waiting_until: None,
            stepped_at: Instant::now(),
            counted: Counted::default(),
            is_refused: false,
            chosen: BTreeMap::new(),
            resizing: Vec::new(),
            delays: Delays::default(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<SchedulerMessage>,
        message: SchedulerMessage,
        state: &mut SchedulerState,
    ) -> Result<(), ActorProcessingErr> {
        state.core.step(Input::Now(state.began.elapsed()));
        state.core.step(Input::Encodes(state.arguments.pacing.card.encodes()));
        let effects = match message {
            // Messages are dropped unread, because the driver submits its request again to the
            // successor.
            _ if state.is_refused && !matches!(message, SchedulerMessage::InjectFault(_)) => return Ok(()),
            SchedulerMessage::Stepped(Err(error)) | SchedulerMessage::Copied(Err(error))
                if error.is_out_of_memory() =>
            {
                state.is_refused = true;
                (state.arguments.refused)(error);
                return Ok(());
            }
            SchedulerMessage::Admit(admission) => {
                let Admission { sequence, pins, deliveries, span, last_token } = *admission;
                span.in_scope(|| {
                    debug!(target: TARGET, sequence = sequence.id.0, tokens = sequence.tokens.len(), "waiting for blocks")
                });
                // A sequence that already has a token was admitted before and has lost its blocks.
                let (deliveries, was_preempted) = (Some(deliveries), last_token.is_some());
                let caller = Caller { deliveries, pins, span, has_begun: false, last_token, was_preempted };
                state.callers.insert(sequence.id, caller);
                state.core.step(Input::Admit(Box::new(sequence)))
            }
            SchedulerMessage::Cancel(sequence) => state.cancel(sequence),
            // A failed step leaves its sequences incomplete. The actor dies, so that their
            // drivers submit them again.
            SchedulerMessage::Stepped(outcome) => {
                let [took, drafted, stepped] = state.stepped(outcome?);
                state.core.step(took);
                state.core.step(drafted);
                state.core.step(stepped)
            }
            SchedulerMessage::Copied(outcome) => {
                let took = outcome?;
                metric::KV_COPY_SECONDS.record(&state.arguments.model, took);
                state.core.step(Input::Copied(took.as_micros() as u64))
            }
            SchedulerMessage::Resize { blocks, reply } => {
                state.resizing.push(reply);
                state.delays.resized = Some(Instant::now());
                state.core.step(Input::Resize(blocks))
            }
            SchedulerMessage::Gathered => state.core.step(Input::Gathered),
            SchedulerMessage::LookUp { prefix, reply } => {
                reply.answer(state.core.kv().known_prefix(prefix.as_slice()) * BLOCK_TOKENS);
                return Ok(());
            }
            SchedulerMessage::KvUse(reply) => {
                reply.answer(state.core.kv().usage());
                Vec::new()
            }
            SchedulerMessage::Show => {
                state.show_pool();
                myself.send_after(metric::SHOWN_EVERY, || SchedulerMessage::Show);
                Vec::new()
            }
            SchedulerMessage::InjectFault(fault) => return Err(fault.inject().into()),
        };
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            effects.extend(state.act(&myself, effect));
        }
        state.arguments.block_log.record(state.core.take_block_events());
        state.show();
        Ok(())
    }
}

impl Drop for SchedulerState {
    /// Records the counts of the last message, even if the actor dies while it handles that
    /// message.
    fn drop(&mut self) {
        self.count();
        self.arguments.block_log.close();
    }
}

/// The time for which a model still counts as waiting for blocks after the last shortage.
const DEMAND_HOLD: Duration = Duration::from_secs(1);

impl SchedulerState {
    fn show(&mut self) {
        let (waiting, running) = self.core.counts();
        let model = &self.arguments.model;
        metric::SEQUENCES_WAITING.set(model, waiting);
        metric::SEQUENCES_RUNNING.set(model, running);
        metric::PERMITS_USED.set(&(model.clone(), Permit::Sequences), running);
        metric::STEPS_UNDER_WAY.set(model, self.under_way.len());
        self.arguments.pacing.card.set_streams(self.core.streams());
        let usage = self.core.kv().usage();
        self.arguments.kv_use.send_if_modified(|shown| std::mem::replace(shown, usage) != usage);
        let KvUse { held, cached, .. } = usage;
        metric::KV_BLOCKS_USED.set(model, held);
        metric::KV_BLOCKS_CACHED.set(model, cached);
        if self.core.kv().groups().count() > 1 {
            for (group, blocks) in self.core.kv().table_blocks().enumerate() {
                metric::KV_GROUP_BLOCKS.set(&(model.clone(), CacheGroupIndex(group)), blocks);
            }
        }
        metric::KV_BLOCKS_SWAPPED.set(model, self.core.kv().host_blocks());
        metric::PREFIX_CACHE_BYTES.set(model, self.arguments.block_bytes * cached as u64);
        let StateUse { slots, live, snapshots, on_host } = self.core.kv().state_usage();
        if slots > 0 {
            metric::STATE_SLOTS.set(model, slots);
            metric::STATE_SLOTS_USED.set(model, live);
            metric::STATE_SNAPSHOTS.set(model, snapshots);
            metric::STATE_SNAPSHOTS_SWAPPED.set(model, on_host);
        }
        self.report_need();
        self.count();
    }

    /// Publishes the model's demand for blocks. The demand stays at `WaitingForBlocks` for a while,
    /// so that the budget is not notified at each step.
    fn report_need(&mut self) {
        let Some(demand) = &self.arguments.demand else { return };
        let (now, preempted) = (Instant::now(), self.core.preemptions().for_blocks);
        if self.core.lacks_blocks() || preempted > self.counted.preempted.for_blocks {
            self.waiting_until = Some(now + DEMAND_HOLD);
        }
        demand.set(match self.core.counts() {
            (0, 0) => KvDemand::Idle,
            _ if self.waiting_until.is_some_and(|until| now < until) => KvDemand::WaitingForBlocks,
            _ => KvDemand::Busy,
        });
    }

    /// Sets the gauges that change only with the pool's size.
    fn show_pool(&self) {
        let model = &self.arguments.model;
        metric::KV_BLOCKS.set(model, self.core.kv().blocks());
        metric::KV_BLOCK_TOKENS.set(model, BLOCK_TOKENS);
    }

    /// Records the counts since the last call.
    fn count(&mut self) {
        let model = &self.arguments.model;
        let preempted = self.core.preemptions();
        for tokens in self.core.take_prediction_errors() {
            metric::REPLY_PREDICTION_ERROR_TOKENS.record(model, tokens);
        }
        for (tenant, tokens) in self.core.take_tenants_tokens() {
            metric::TENANT_TOKENS_TOTAL.add(&(model.clone(), tenant), tokens);
        }
        let drafts = self.core.take_verified_drafts();
        if drafts.drafted > 0 {
            metric::DRAFT_TOKENS_TOTAL.add(model, drafts.drafted);
        }
        for (position, tokens) in drafts.accepted.into_iter().enumerate() {
            metric::DRAFT_TOKENS_ACCEPTED_TOTAL.add(&(model.clone(), DraftPosition(position)), tokens);
        }
        let counted = std::mem::replace(&mut self.counted, Counted { preempted, ..Counted::default() });
        let tokens = [
            (&metric::GENERATED_TOKENS_TOTAL, counted.generated),
            (&metric::PREFIX_CACHE_QUERIES_TOTAL, counted.sought),
            (&metric::PREFIX_CACHE_HITS_TOTAL, counted.found),
        ];
        // Most messages change none of these counters.
        for (counter, tokens) in tokens.into_iter().filter(|(_, tokens)| *tokens > 0) {
            counter.add(model, tokens);
        }
        let before = counted.preempted;
        let preempted = [
            (Preempted::Blocks, preempted.for_blocks - before.for_blocks),
            (Preempted::Priority, preempted.for_priority - before.for_priority),
            (Preempted::Shrink, preempted.by_shrinks - before.by_shrinks),
        ];
        for (reason, more) in preempted.into_iter().filter(|(_, more)| *more > 0) {
            metric::PREEMPTIONS_TOTAL.add(&(model.clone(), reason), more);
        }
    }

    fn act(&mut self, myself: &ActorRef<SchedulerMessage>, effect: Effect) -> Vec<Effect> {
        match effect {
            Effect::Run(plan) => self.run(myself.clone(), *plan),
            Effect::Copy(copies) => self.copy(myself.clone(), *copies),
            Effect::LacksBlocks(sequences, blocks) => {
                let tell =
                    |id| self.trace(id, || debug!(target: TARGET, short_by = blocks, "waiting: too few free blocks"));
                sequences.into_iter().for_each(tell);
            }
            Effect::Begun(sequence, tokens) => {
                self.trace(sequence, || debug!(target: TARGET, cached_tokens = tokens, "started"));
                self.counted.found += tokens;
                self.counted.sought += self.core.sequence(sequence).map_or(0, |spec| spec.tokens.len());
                self.deliver(sequence, Delivery::Begun(tokens));
            }
            Effect::Token(sequence, _) => {
                let token = match self.next_chosen(sequence) {
                    Some(Ok(token)) => token,
                    _ => unreachable!("the core reports only rows with a chosen token"),
                };
                if !self.deliver(sequence, Delivery::Token(token, self.stepped_at)) {
                    return self.cancel(sequence);
                }
                self.keep_time(sequence);
                self.counted.generated += 1;
            }
            Effect::Finished(sequence, finish) => {
                self.trace(sequence, || debug!(target: TARGET, ?finish, "last step finished"));
                let end = match self.next_chosen(sequence) {
                    Some(Err(error)) => Delivery::Broken(Arc::new(error)),
                    _ => Delivery::Finished(finish),
                };
                self.deliver(sequence, end);
            }
            Effect::Readmit(sequence) => {
                self.trace(sequence, || debug!(target: TARGET, "preempted; its pictures are requested again"));
                metric::PICTURES_WANTED_AGAIN_TOTAL.add(&self.arguments.model, 1);
                self.deliver(sequence, Delivery::Readmit);
            }
            Effect::Late(sequence, deadline) => {
                self.trace(sequence, || debug!(target: TARGET, deadline = deadline.name(), "cannot meet its deadline"));
                self.deliver(sequence, Delivery::Late(deadline));
                self.callers.remove(&sequence);
            }
            Effect::Released(sequences) => {
                for id in sequences {
                    self.trace(id, || debug!(target: TARGET, "blocks released"));
                    // A preempted sequence still has a caller. The callers of ended sequences are
                    // dropped.
                    if !self.core.is_known(id) {
                        self.callers.remove(&id);
                    } else if let Some(caller) = self.callers.get_mut(&id) {
                        caller.was_preempted = true;
                    }
                }
            }
            Effect::Gather => drop(myself.send_after(GATHERING, || SchedulerMessage::Gathered)),
            Effect::Resized => {
                self.show_pool();
                self.delays.resized = Some(Instant::now());
                self.resizing.drain(..).for_each(|reply| reply.answer(()));
            }
        }
        Vec::new()
    }

    /// Cancels a sequence whose caller has disconnected. A running step still fills the sequence's
    /// blocks, and other sequences may share these blocks afterward. The pictures stay pinned
    /// until the steps that read them have run.
    fn cancel(&mut self, sequence: SequenceId) -> Vec<Effect> {
        let effects = self.core.step(Input::Cancel(sequence));
        if !self.core.is_known(sequence) {
            self.callers.remove(&sequence);
        } else if let Some(caller) = self.callers.get_mut(&sequence) {
            caller.deliveries = None;
        }
        effects
    }

    /// Processes the lane's answer to the oldest step. Delivers the scores to the callers, and
    /// keeps the chosen tokens until the core reports them. Returns three inputs for the core: the
    /// duration of the step, the drafts, and the token ids.
    fn stepped(&mut self, Stepped { chosen, drafts, scores, is_by_graph, imbalance }: Stepped) -> [Input; 3] {
        let model = &self.arguments.model;
        if is_by_graph {
            metric::GRAPH_REPLAYS_TOTAL.add(model, 1)
        } else {
            metric::EAGER_STEPS_TOTAL.add(model, 1)
        }
        if let Some(imbalance) = imbalance {
            metric::EXPERT_IMBALANCE.set(model, imbalance);
        }
        let UnderWay { rows, scored, launched, has_prompts, encodes } =
            self.under_way.pop_front().expect("the lane answers steps in the order of submission");
        // A step that was queued after another step begins when the other step has ended.
        let begun = launched.max(std::mem::replace(&mut self.stepped_at, Instant::now()));
        let took = self.stepped_at - begun;
        metric::STEP_SECONDS.record(model, took);
        self.delays.stepped(self.stepped_at, has_prompts, encodes || self.arguments.pacing.card.encodes());
        let mut scores = scores.into_iter();
        for Scored { sequence, first, tokens, .. } in scored {
            let scores = scores.by_ref().take(tokens.len()).collect();
            self.deliver(sequence, Delivery::Scores { first, scores });
        }
        let id = |chosen: &Result<Token, _>| chosen.as_ref().ok().map(|token| token.id);
        let tokens = chosen.iter().map(|chosen| chosen.iter().map(id).collect()).collect();
        self.chosen = rows.iter().map(|rows| rows.sequence).zip(chosen.into_iter().map(VecDeque::from)).collect();
        [Input::Took(took.as_micros() as u64), Input::Drafted(drafts), Input::Stepped(tokens)]
    }

    /// The next token that the step which just ended chose for this sequence.
    fn next_chosen(&mut self, sequence: SequenceId) -> Option<Result<Token, SamplingError>> {
        self.chosen.get_mut(&sequence)?.pop_front()
    }

    /// Records that a token was delivered, and counts it if it is later than promised.
    fn keep_time(&mut self, sequence: SequenceId) {
        let Some(caller) = self.callers.get_mut(&sequence) else { return };
        let was_preempted = std::mem::take(&mut caller.was_preempted);
        let (Some(last), Some(promise)) = (caller.last_token.replace(self.stepped_at), self.arguments.pacing.promise)
        else {
            return;
        };
        if self.stepped_at.saturating_duration_since(last) > promise {
            let reason = self.delays.reason(last, was_preempted);
            metric::TOKEN_INTERVAL_MISSED_TOTAL.add(&(self.arguments.model.clone(), reason), 1);
        }
    }

    /// Records an event in the span of the sequence's request.
    fn trace(&self, sequence: SequenceId, tell: impl FnOnce()) {
        if let Some(caller) = self.callers.get(&sequence) {
            caller.span.in_scope(tell);
        }
    }

    /// Returns the spans of the requests for which the lane records a step: requests that begin
    /// with this step, and requests whose prompts the step continues. Decoding requests are left
    /// out, because one event per token would be too many events to read.
    fn spans(&mut self, plan: &StepPlan) -> Vec<Span> {
        if !enabled!(target: TARGET, Level::DEBUG) {
            return Vec::new();
        }
        let tokens = plan.batch.query_starts.windows(2).map(|ends| ends[1] - ends[0]);
        let span = |(id, tokens): (&SequenceId, u32)| {
            let caller = self.callers.get_mut(id)?;
            let begins = !std::mem::replace(&mut caller.has_begun, true);
            let is_reply = self.core.sequence(*id).is_some_and(|spec| spec.produced > 0);
            (begins || tokens > 1 && !is_reply).then(|| caller.span.clone())
        };
        plan.parts.iter().zip(tokens).filter_map(span).collect()
    }

    /// Delivers to the caller. Returns `false` if the caller has disconnected.
    fn deliver(&self, sequence: SequenceId, delivery: Delivery) -> bool {
        let deliveries = self.callers.get(&sequence).and_then(|caller| caller.deliveries.as_ref());
        deliveries.is_some_and(|deliveries| deliveries.try_send(delivery).is_ok())
    }

    fn run(&mut self, myself: ActorRef<SchedulerMessage>, plan: StepPlan) {
        let choices = plan.rows.iter().map(|row| self.choice(row)).collect();
        let score = |scored: &Scored| {
            let top = scored.top;
            scored.tokens.iter().map(move |token| Score { token: *token, top }).collect::<Vec<_>>()
        };
        let scores = plan.scored.iter().flat_map(score).collect();
        let pins = plan.shown.read.iter().filter_map(|id| self.callers.get(id)?.pins.clone());
        let pins = pins.map(|pins| pins as Arc<dyn Send + Sync>).collect();
        let spans = self.spans(&plan);
        // From here on, only the steps that read these pictures keep them pinned.
        for unread in &plan.shown.no_longer_read {
            self.callers.get_mut(unread).into_iter().for_each(|caller| caller.pins = None);
        }
        let (has_prompts, encodes) = (plan.has_prompts, self.arguments.pacing.card.encodes());
        let (rows, scored, launched) = (plan.rows, plan.scored, Instant::now());
        self.under_way.push_back(UnderWay { has_prompts, encodes, rows, scored, launched });
        metric::STEP_TOKENS.record(&self.arguments.model, plan.batch.token_count());
        let answer = Answer::to(move |outcome| {
            // An actor that has ended does not need the answer.
            drop(myself.send_message(SchedulerMessage::Stepped(outcome)));
        });
        let job = StepJob { batch: plan.batch, choices, scores, pins, spans, answer };
        self.arguments.lane.submit(Job::Step(Box::new(job)));
    }

    fn copy(&self, myself: ActorRef<SchedulerMessage>, Copies { blocks, states }: Copies) {
        let SchedulerArguments { model, block_bytes, state_bytes, .. } = &self.arguments;
        for (direction, blocks, states) in [
            (Direction::ToHost, blocks.to_host.len(), states.to_host.len()),
            (Direction::ToDevice, blocks.to_device.len(), states.to_device.len()),
        ] {
            let label = (model.clone(), direction);
            metric::KV_COPIED_BYTES_TOTAL.add(&label, (*block_bytes * blocks as u64).as_usize());
            metric::STATE_COPIED_BYTES_TOTAL.add(&label, (*state_bytes * states as u64).as_usize());
        }
        metric::PREFIX_CACHE_HOST_HITS_TOTAL.add(model, blocks.to_device.len() * BLOCK_TOKENS);
        let answer = Answer::to(move |outcome| {
            // An actor that has ended does not need the answer.
            drop(myself.send_message(SchedulerMessage::Copied(outcome)));
        });
        self.arguments.lane.submit(Job::Copy(Box::new(CopyJob { copied: Copied::Cache { blocks, states }, answer })));
    }

    fn choice(&self, rows: &ChosenRows) -> Choice {
        let ChosenRows { sequence, position, unseen, drafts, further } = rows;
        let spec = self.core.sequence(*sequence).expect("a planned sequence runs");
        let produced = &spec.tokens[spec.tokens.len() - spec.produced..];
        assert_eq!(produced.len() + usize::from(unseen.is_some()), *position, "at most one token is unseen");
        let past = spec.sampler.reads_past().then(|| PastTokens {
            prompt: spec.prompt_read.clone(),
            produced: [produced, drafts].concat(),
            unseen: *unseen,
        });
        let acceptance = self.arguments.synthetic_acceptance.map_or(Acceptance::Equal, Acceptance::Synthetic);
        let (sampler, drafts, further) = (spec.sampler.clone(), drafts.clone(), further.clone());
        Choice { sampler, position: *position as u64, past, drafts, acceptance, further }
    }
}

#[cfg(test)]
mod tests;
