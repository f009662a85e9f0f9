//! The scheduler actor: a thin shell around its core.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use bursar_budgets::Label;
use bursar_kernels::ops::argmax::NO_CHOICE;
use bursar_model::{error::SamplingError, flow::Token, sampling::Score};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::{sync::mpsc, time::Instant};
use tracing::{Level, Span, debug, enabled};

use super::{Admission, ChosenRow, Delivery, Effect, Input, Limits, SchedulerCore, SchedulerMessage, Scored, StepPlan};
use crate::{
    compute::lane::{Answer, Choice, Job, Lane, PastTokens, RefusalSink, StepJob, Stepped},
    kv::{KvMessage, SequenceId},
    metric::{self, Permit, Preempted},
    responder::Responder,
    tree,
    vision::PinnedPictures,
};

/// How long the second step of a burst waits for those that came together with the first: a millisecond or two, as the
/// timer has it, where the first takes eleven with a prompt of 512 tokens and 7B's shape on an H200.
const GATHERING: Duration = Duration::from_millis(1);

/// Runs step after step for as long as there is a sequence.
pub struct SchedulerActor;

/// What it starts with.
pub struct SchedulerArguments {
    /// The profile record's numbers.
    pub limits: Limits,
    /// Whose blocks.
    pub kv: ActorRef<KvMessage>,
    /// Where steps run.
    pub lane: Lane,
    /// For metrics.
    pub model: Label,
    /// Who sees to it that there is memory again.
    pub refused: RefusalSink,
}

/// Its state.
pub struct SchedulerState {
    core: SchedulerCore,
    callers: BTreeMap<SequenceId, Caller>,
    arguments: SchedulerArguments,
    /// The oldest first.
    under_way: VecDeque<UnderWay>,
    /// When the last step ended.
    stepped_at: Instant,
    /// What this message has come to, so far.
    counted: Counted,
    /// A step was refused memory: whoever was told of it is about to replace this actor.
    is_refused: bool,
    /// What the step that has just ended chose, beyond what the core needs to know.
    chosen: BTreeMap<SequenceId, Result<Token, SamplingError>>,
    /// Who waits for another number of blocks to be in use.
    resizing: Vec<Responder<()>>,
}

/// A step that the lane has.
struct UnderWay {
    /// Whose rows it has.
    rows: Vec<ChosenRow>,
    /// Whose prompts it scores.
    scored: Vec<Scored>,
    launched: Instant,
}

/// What is counted once a message, and not once a sequence: a step has hundreds.
#[derive(Default)]
struct Counted {
    /// Tokens that were delivered.
    generated: usize,
    /// Tokens of sequences that began, and those of them that were found.
    sought: usize,
    found: usize,
    /// Those of the core that were told before.
    preempted: usize,
}

/// Who waits for a sequence, and what is held for it.
struct Caller {
    /// None once it has gone.
    deliveries: Option<mpsc::Sender<Delivery>>,
    /// None once no step to come wants them.
    pins: Option<Arc<PinnedPictures>>,
    span: Span,
    /// A step has been planned with it.
    has_begun: bool,
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
        Ok(SchedulerState {
            core: SchedulerCore::new(arguments.limits),
            callers: BTreeMap::new(),
            arguments,
            under_way: VecDeque::new(),
            stepped_at: Instant::now(),
            counted: Counted::default(),
            is_refused: false,
            chosen: BTreeMap::new(),
            resizing: Vec::new(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<SchedulerMessage>,
        message: SchedulerMessage,
        state: &mut SchedulerState,
    ) -> Result<(), ActorProcessingErr> {
        let effects = match message {
            // Dropped as it is: its driver comes again to the successor.
            _ if state.is_refused && !matches!(message, SchedulerMessage::InjectFault(_)) => return Ok(()),
            SchedulerMessage::Stepped(Err(error)) if error.is_out_of_memory() => {
                state.is_refused = true;
                (state.arguments.refused)(error);
                return Ok(());
            }
            SchedulerMessage::Admit(Admission { sequence, pins, deliveries, span }) => {
                span.in_scope(|| debug!(sequence = sequence.id.0, tokens = sequence.tokens.len(), "waits for blocks"));
                state
                    .callers
                    .insert(sequence.id, Caller { deliveries: Some(deliveries), pins, span, has_begun: false });
                state.core.step(Input::Admit(Box::new(sequence)))
            }
            SchedulerMessage::Cancel(sequence) => state.cancel(sequence),
            // A step that failed leaves its sequences half done: die, and let their drivers come again.
            SchedulerMessage::Stepped(outcome) => {
                let stepped = state.stepped(outcome?);
                state.core.step(stepped)
            }
            SchedulerMessage::Resize { blocks, reply } => {
                state.resizing.push(reply);
                state.core.step(Input::Resize(blocks))
            }
            SchedulerMessage::Gathered => state.core.step(Input::Gathered),
            SchedulerMessage::Show => {
                myself.send_after(metric::SHOWN_EVERY, || SchedulerMessage::Show);
                Vec::new()
            }
            SchedulerMessage::InjectFault(fault) => return Err(fault.strike().into()),
        };
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            effects.extend(state.act(&myself, effect).await?);
        }
        state.show();
        Ok(())
    }
}

impl Drop for SchedulerState {
    /// What was delivered before a death is counted too.
    fn drop(&mut self) {
        self.count();
    }
}

impl SchedulerState {
    fn show(&mut self) {
        let (waiting, running) = self.core.counts();
        let model = &self.arguments.model;
        metric::SEQUENCES_WAITING.set(model, waiting);
        metric::SEQUENCES_RUNNING.set(model, running);
        metric::PERMITS_USED.set(&(model.clone(), Permit::Sequences), running);
        metric::STEPS_UNDER_WAY.set(model, self.under_way.len());
        self.count();
    }

    /// Records what has been counted since.
    fn count(&mut self) {
        let model = &self.arguments.model;
        let preempted = self.core.preempted();
        let counted = std::mem::replace(&mut self.counted, Counted { preempted, ..Counted::default() });
        let tokens = [
            (&metric::GENERATED_TOKENS_TOTAL, counted.generated),
            (&metric::PREFIX_CACHE_QUERIES_TOTAL, counted.sought),
            (&metric::PREFIX_CACHE_HITS_TOTAL, counted.found),
        ];
        // Most messages bring nothing of it.
        for (counter, tokens) in tokens.into_iter().filter(|(_, tokens)| *tokens > 0) {
            counter.add(model, tokens);
        }
        let more = preempted - counted.preempted;
        if more > 0 {
            metric::PREEMPTIONS_TOTAL.add(&(model.clone(), Preempted::Blocks), more);
        }
    }

    async fn act(
        &mut self,
        myself: &ActorRef<SchedulerMessage>,
        effect: Effect,
    ) -> Result<Vec<Effect>, ActorProcessingErr> {
        match effect {
            Effect::Allot(demands) => {
                let begin = demands.iter().filter(|demand| demand.held == 0);
                let spans = begin.filter_map(|demand| self.told_of(demand.sequence)).collect();
                let allot = |reply| KvMessage::Allot { demands, spans, reply };
                let allotment = tree::ALLOT_BLOCKS.ask(&self.arguments.kv, allot).await?;
                return Ok(self.core.step(Input::Allotted(allotment)));
            }
            Effect::Run(plan) => self.run(myself.clone(), *plan),
            Effect::Name(filled) => self.arguments.kv.send_message(KvMessage::Name(filled))?,
            Effect::Found(sequence, tokens) => {
                self.trace(sequence, || debug!(cached_tokens = tokens, "begins"));
                self.counted.found += tokens;
                self.counted.sought += self.core.sequence(sequence).map_or(0, |spec| spec.tokens.len());
                self.deliver(sequence, Delivery::Found(tokens));
            }
            Effect::Token(sequence, _) => {
                let token = match self.chosen.remove(&sequence) {
                    Some(Ok(token)) => token,
                    _ => unreachable!("the core passes on what was chosen"),
                };
                if !self.deliver(sequence, Delivery::Token(token, self.stepped_at)) {
                    return Ok(self.cancel(sequence));
                }
                self.counted.generated += 1;
            }
            Effect::Finished(sequence, finish) => {
                self.trace(sequence, || debug!(?finish, "its last step has run"));
                let end = match self.chosen.remove(&sequence) {
                    Some(Err(error)) => Delivery::Broken(Arc::new(error)),
                    _ => Delivery::Finished(finish),
                };
                self.deliver(sequence, end);
            }
            Effect::ComeAgain(sequence) => {
                self.trace(sequence, || debug!("preempted, and wants its pictures again"));
                metric::PICTURES_WANTED_AGAIN_TOTAL.add(&self.arguments.model, 1);
                self.deliver(sequence, Delivery::ComeAgain);
            }
            Effect::Release(sequences) => {
                // A preempted sequence is still waited for; the callers of ended ones are let go.
                sequences.iter().filter(|id| !self.core.is_known(**id)).for_each(|id| drop(self.callers.remove(id)));
                self.arguments.kv.send_message(KvMessage::Release(sequences))?;
            }
            Effect::Shrink(to) => {
                let holders =
                    tree::SHRINK_BLOCKS.ask(&self.arguments.kv, |reply| KvMessage::Shrink { to, reply }).await?;
                let labels = (self.arguments.model.clone(), Preempted::Shrink);
                metric::PREEMPTIONS_TOTAL.add(&labels, holders.len());
                return Ok(self.core.step(Input::Shrunk(holders)));
            }
            Effect::Grow(blocks) => self.arguments.kv.send_message(KvMessage::Grow(blocks))?,
            Effect::Gather => drop(myself.send_after(GATHERING, || SchedulerMessage::Gathered)),
            Effect::Resized => self.resizing.drain(..).for_each(|reply| reply.answer(())),
        }
        Ok(Vec::new())
    }

    /// Nobody hears of it any more. What a step under way computes of it may serve others; its pictures stay where they are
    /// until the steps have run that read them.
    fn cancel(&mut self, sequence: SequenceId) -> Vec<Effect> {
        let effects = self.core.step(Input::Cancel(sequence));
        if !self.core.is_known(sequence) {
            self.callers.remove(&sequence);
        } else if let Some(caller) = self.callers.get_mut(&sequence) {
            caller.deliveries = None;
        }
        effects
    }

    /// Takes the lane's answer apart: the core hears of tokens, callers of the rest.
    fn stepped(&mut self, Stepped { chosen, scores, is_by_graph }: Stepped) -> Input {
        let model = &self.arguments.model;
        match is_by_graph {
            true => metric::GRAPH_REPLAYS_TOTAL.add(model, 1),
            false => metric::EAGER_STEPS_TOTAL.add(model, 1),
        }
        let UnderWay { rows, scored, launched } =
            self.under_way.pop_front().expect("the lane answers what it was given, in order");
        // One behind another is begun when that has ended.
        let begun = launched.max(std::mem::replace(&mut self.stepped_at, Instant::now()));
        metric::STEP_SECONDS.record(model, self.stepped_at - begun);
        let mut scores = scores.into_iter();
        for Scored { sequence, first, tokens, .. } in scored {
            let scores = scores.by_ref().take(tokens.len()).collect();
            self.deliver(sequence, Delivery::Scores { first, scores });
        }
        let tokens = chosen.iter().map(|chosen| chosen.as_ref().map_or(NO_CHOICE, |token| token.id)).collect();
        self.chosen = rows.iter().map(|row| row.sequence).zip(chosen).collect();
        Input::Stepped(tokens)
    }

    /// Tells something in the course of its request.
    fn trace(&self, sequence: SequenceId, tell: impl FnOnce()) {
        if let Some(caller) = self.callers.get(&sequence) {
            caller.span.in_scope(tell);
        }
    }

    /// A sequence with its request, for who else tells of it.
    fn told_of(&self, sequence: SequenceId) -> Option<(SequenceId, Span)> {
        self.callers.get(&sequence).map(|caller| (sequence, caller.span.clone()))
    }

    /// The requests that a lane tells of a step: those that begin with it, and those whose prompts it goes on with. One
    /// that decodes has a step for each of its tokens, and nobody would read that.
    fn spans(&mut self, plan: &StepPlan) -> Vec<Span> {
        if !enabled!(Level::DEBUG) {
            return Vec::new();
        }
        let tokens = plan.batch.query_starts.windows(2).map(|ends| ends[1] - ends[0]);
        let span = |(id, tokens): (&SequenceId, u32)| {
            let caller = self.callers.get_mut(id)?;
            let begins = !std::mem::replace(&mut caller.has_begun, true);
            (begins || tokens > 1).then(|| caller.span.clone())
        };
        plan.parts.iter().zip(tokens).filter_map(span).collect()
    }

    /// Whether the caller is still there.
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
        // From here on only the steps that read them hold them.
        for past in &plan.shown.past {
            self.callers.get_mut(past).into_iter().for_each(|caller| caller.pins = None);
        }
        self.under_way.push_back(UnderWay { rows: plan.rows, scored: plan.scored, launched: Instant::now() });
        metric::STEP_TOKENS.record(&self.arguments.model, plan.batch.token_count());
        let answer = Answer::to(move |outcome| {
            // An actor that is gone does not wait for it.
            drop(myself.send_message(SchedulerMessage::Stepped(outcome)));
        });
        let job = StepJob { batch: plan.batch, choices, scores, pins, spans, answer };
        self.arguments.lane.submit(Job::Step(Box::new(job)));
    }

    fn choice(&self, row: &ChosenRow) -> Choice {
        let spec = self.core.sequence(row.sequence).expect("a planned sequence runs");
        let produced = &spec.tokens[spec.tokens.len() - spec.produced..];
        assert_eq!(produced.len() + usize::from(row.unseen.is_some()), row.position, "one token at most is unseen");
        let past = spec.sampler.reads_past().then(|| PastTokens {
            prompt: spec.prompt_read.clone(),
            produced: produced.iter().copied().chain(row.unseen).collect(),
        });
        Choice { sampler: spec.sampler.clone(), position: row.position as u64, past }
    }
}

#[cfg(test)]
mod tests;
