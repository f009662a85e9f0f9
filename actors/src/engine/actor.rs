//! The engine supervisor: starts a model's actors and answers for them.

mod show;
mod sizing;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, Device, DeviceError, Gate, Label, Owner};
use bursar_kernels::BLOCK_TOKENS;
use bursar_model::{Envelope, checkpoint::CheckpointOrigin};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;

use super::{
    EngineMessage, Lanes, LanesPlace, LoadOptions, ProgressSink, Serving, StartError, Status, WeightStore, WhichLane,
    elastic::{Elastic, Place},
    start::{Planned, StartPlan},
};
use crate::{
    budget::Budget,
    capture::{Recaptured, recapture},
    compute::lane::{Job, Lane},
    compute::memory::VisionCache,
    kv::{KvActor, KvArguments, KvMessage},
    metric,
    profile::{AttemptReport, Attempts, Course, ProfileError, Profiled},
    scheduler::{Limits, SchedulerActor, SchedulerArguments, SchedulerMessage},
    supervise::{BackgroundTask, Decision, Latest, Policy, RestartLog, end_of},
    tree::Role,
    vision::{VisionActor, VisionArguments, VisionMessage},
};

/// Supervises one model.
pub struct EngineActor;

/// What it starts with.
#[derive(Clone)]
pub struct EngineArguments {
    /// The model's name.
    pub label: Label,
    /// Where its files come from.
    pub source: CheckpointOrigin,
    /// What the user chose.
    pub options: LoadOptions,
    /// Where leases come from.
    pub budget: Budget,
    /// Where memory comes from.
    pub device: Arc<dyn Device>,
    /// What outlives this engine.
    pub weight_store: WeightStore,
    /// How many engines this model has had.
    pub generation: u64,
    /// Where handles look.
    pub status: Arc<watch::Sender<Status>>,
    /// Who watches the start.
    pub progress: ProgressSink,
}

/// Its state.
pub struct EngineState {
    arguments: EngineArguments,
    /// Planning and loading, while they are under way.
    task: Option<BackgroundTask>,
    /// Decoding is captured again on a new lane, which decodes launch by launch meanwhile.
    recapture: Latest,
    /// What the plan says; of the latest attempt that came so far, whether or not it was loaded.
    plan: Option<StartPlan>,
    planned: Option<Planned>,
    attempts: Attempts,
    /// Each attempt that has ended, and that it was ready of the one that serves.
    reports: Vec<AttemptReport>,
    /// How far the attempt under way is.
    course: Course,
    /// What would make the model fit is being worked out, for the error that its start ends in.
    advice: Option<BackgroundTask>,
    /// The attempt that serving lives on: all is held in its name, also behind later ones that only made it smaller.
    served_by: Option<u32>,
    /// Since which start of serving actors there is this vision actor, which outlives the others.
    vision_since: u64,
    /// What was refused memory while it served is to be served again when keys and values are smaller.
    is_redoing: bool,
    /// The attempt whose steps were refused memory on purpose.
    injected: Option<u32>,
    profile: Option<ActorCell>,
    profiled: Option<Arc<Profiled>>,
    /// How many blocks keys and values have, from READY on.
    elastic: Option<Elastic>,
    children: Children,
    restarts: RestartLog,
    born: Instant,
    /// When the last attempt began.
    attempted: Instant,
    /// What the last attempt that got ready took.
    sized_within: Option<Duration>,
    servings: u64,
    deaths: u64,
    /// A restart that is waited for: its number, and the first of the children that it starts.
    restarting: Option<(u64, usize)>,
}

/// The serving actors, in the order in which they start: each may hold what the ones before it gave out, so the death
/// of one ends those behind it. The scheduler's death ends the kv actor too: nobody else could tell it which of its
/// tables nobody needs any more.
#[derive(Default)]
struct Children {
    vision: Option<ActorRef<VisionMessage>>,
    kv: Option<ActorRef<KvMessage>>,
    scheduler: Option<ActorRef<SchedulerMessage>>,
}

const KV: usize = 1;

/// Those that serve, by place.
const CHILDREN: [Role; 3] = [Role::Vision, Role::Kv, Role::Scheduler];

impl Children {
    fn cells(&self) -> [Option<ActorCell>; CHILDREN.len()] {
        [
            self.vision.as_ref().map(ActorRef::get_cell),
            self.kv.as_ref().map(ActorRef::get_cell),
            self.scheduler.as_ref().map(ActorRef::get_cell),
        ]
    }

    fn place(&self, cell: &ActorCell) -> Option<usize> {
        self.cells().iter().position(|child| child.as_ref().is_some_and(|child| child.get_id() == cell.get_id()))
    }

    /// Forgets the children from `first` on; gives those that may still live, last first.
    fn take_from(&mut self, first: usize) -> Vec<ActorCell> {
        let cells = self.cells();
        if first == 0 {
            self.vision = None;
        }
        self.kv = None;
        self.scheduler = None;
        cells.into_iter().skip(first).flatten().rev().collect()
    }
}

impl Actor for EngineActor {
    type Msg = EngineMessage;
    type State = EngineState;
    type Arguments = EngineArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<EngineMessage>,
        arguments: EngineArguments,
    ) -> Result<EngineState, ActorProcessingErr> {
        myself.send_message(EngineMessage::Begin)?;
        myself.send_message(EngineMessage::Show)?;
        Ok(EngineState {
            restarts: RestartLog::new(Policy::RestForOne, arguments.options.intensity, CHILDREN.len()),
            attempts: Attempts::new(arguments.options.kv().is_pinned()),
            arguments,
            task: None,
            recapture: Latest::default(),
            plan: None,
            planned: None,
            reports: Vec::new(),
            course: Course::default(),
            advice: None,
            served_by: None,
            vision_since: 0,
            is_redoing: false,
            injected: None,
            profile: None,
            profiled: None,
            elastic: None,
            children: Children::default(),
            born: Instant::now(),
            attempted: Instant::now(),
            sized_within: None,
            servings: 0,
            deaths: 0,
            restarting: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<EngineMessage>,
        message: EngineMessage,
        state: &mut EngineState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            EngineMessage::Begin => state.next_attempt(&myself).await?,
            EngineMessage::Loaded(outcome) => state.loaded(&myself, outcome?).await?,
            EngineMessage::Attempt { generation } => {
                if generation == state.owner().generation {
                    state.next_attempt(&myself).await?;
                }
            }
            EngineMessage::Profiled { generation, .. } if generation != state.owner().generation => {}
            EngineMessage::Profiled { outcome: Ok(profiled), .. } => {
                state.end_profile();
                state.sized_within = Some(state.attempted.elapsed());
                state.plan.iter_mut().for_each(|plan| plan.needs = None);
                state.profiled = Some(Arc::new(profiled));
                state.served_by = Some(state.attempts.number());
                let elastic = Elastic::new(state.elastic_place(), state.envelope());
                // Heard of by the budget before it answers for the gate: nothing is left for it to do behind READY.
                elastic.obey(&myself);
                state.elastic = Some(elastic);
                state.move_gate(Gate::Frozen).await?;
                state.serve(&myself).await?;
            }
            EngineMessage::Profiled { outcome: Err(error), .. } => {
                state.end_profile();
                state.attempt_failed(&myself, error).await?;
            }
            EngineMessage::Advised { error, knobs } => {
                state.give_up(&myself, error, knobs?);
            }
            EngineMessage::Refused { which, generation, error } => {
                if state.serves_on(which, generation) {
                    state.refused_while_serving(&myself, error).await?;
                }
            }
            // What was not captured is run launch by launch. A lane that died of it is heard of by its scheduler, and its
            // successor captures again.
            EngineMessage::Recaptured { task, .. } if !state.recapture.reported(task) => {}
            EngineMessage::Recaptured { outcome, .. } => {
                if !matches!(outcome?, Ok(Recaptured::All)) {
                    metric::GRAPHS_NOT_RECAPTURED_TOTAL.add(&state.arguments.label, 1);
                }
            }
            EngineMessage::Ordered(order) => {
                if let Some(elastic) = &mut state.elastic {
                    elastic.ordered(order, &myself, state.children.scheduler.as_ref());
                }
            }
            EngineMessage::PoolChanged(outcome) => {
                let outcome = outcome?;
                if outcome.is_err() {
                    state.check_device()?;
                }
                if let Some(elastic) = &mut state.elastic {
                    elastic.ended(outcome?, &myself, state.children.scheduler.as_ref());
                }
                if state.is_redoing {
                    state.serve_again(&myself).await?;
                }
            }
            EngineMessage::Restart { restart } => {
                if let Some((_, first)) = state.restarting.take_if(|(number, _)| *number == restart) {
                    let serving = state.start_children(&myself, first).await?;
                    state.let_in(&myself, serving);
                }
            }
            EngineMessage::Show => drop(myself.send_after(metric::SHOWN_EVERY, || EngineMessage::Show)),
            EngineMessage::InjectFault(fault) => return Err(fault.strike().into()),
            EngineMessage::FailLaunches { which, after, count } => {
                if let Some(lane) = state.lane(which) {
                    lane.submit(Job::FailLaunches { after, count });
                }
            }
            EngineMessage::RefuseMemory(which) => {
                if let Some(lane) = state.lane(which) {
                    lane.submit(Job::Refuse);
                }
            }
            EngineMessage::KillLane { which, ended } => {
                if let Some(lane) = state.lane(which) {
                    lane.submit(Job::Die);
                    let end = lane.ended();
                    tokio::spawn(async move {
                        end.await;
                        ended.answer(());
                    });
                }
            }
        }
        state.show();
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<EngineMessage>,
        event: SupervisionEvent,
        state: &mut EngineState,
    ) -> Result<(), ActorProcessingErr> {
        // The state of the dead comes with the news and is let go first: it may have work under way.
        let Some((cell, reason)) = end_of(event) else { return Ok(()) };
        if state.profile.as_ref().is_some_and(|profile| profile.get_id() == cell.get_id()) {
            state.profile = None;
            state.show();
            state.attempt_failed(&myself, ProfileError::Died { reason }).await?;
        } else if let Some(place) = state.children.place(&cell) {
            // One that was stopped in the course of another's restart is no longer listed.
            state.child_died(&myself, place, &reason).await?;
        }
        state.show();
        Ok(())
    }
}

impl EngineState {
    /// The owner of everything that this attempt leases, and that serving then lives on.
    fn owner(&self) -> Owner {
        self.arguments.owner(self.served_by.unwrap_or(self.attempts.number()))
    }

    /// Of the actors that serve, or are about to.
    fn serving_generation(&self) -> u64 {
        self.arguments.generation << 32 | self.servings
    }

    /// A lane of what serves now, or is being sized.
    fn lane(&self, which: WhichLane) -> Option<Lane> {
        let lanes = self.arguments.weight_store.lanes()?;
        match which {
            WhichLane::Step => Some(lanes.step),
            WhichLane::Vision => lanes.vision,
        }
    }

    /// On a device that is lost nothing is tried again: this engine dies of it, and the runtime sees to the rest. The
    /// driver is asked, as a kernel's fault is heard of at the next call.
    fn check_device(&self) -> Result<(), DeviceError> {
        match self.arguments.device.memory() {
            Err(error) if error.is_lost() => Err(error),
            _ => Ok(()),
        }
    }

    fn end_profile(&mut self) {
        if let Some(profile) = self.profile.take() {
            profile.stop(None);
        }
    }

    fn fail(&self, myself: &ActorRef<EngineMessage>, error: StartError) {
        self.arguments.show(Status::Failed(Arc::new(error)));
        myself.stop(None);
    }

    async fn move_gate(&self, to: Gate) -> Result<(), ActorProcessingErr> {
        self.arguments.budget.move_gate(self.arguments.label.clone(), to).await??;
        Ok(())
    }

    /// Starts the serving actors from `first` on.
    async fn start_children(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        first: usize,
    ) -> Result<Serving, ActorProcessingErr> {
        self.revive_lanes(myself).await?;
        self.servings += 1;
        if first == 0 {
            self.vision_since = self.servings;
            self.children.vision = self.spawn_vision(myself).await?;
        }
        let profiled = self.profiled.clone().expect("sized before served");
        let model = self.arguments.label.clone();
        let blocks = self.elastic.as_ref().map_or(profiled.record.kv_blocks, Elastic::blocks);
        let block_bytes = profiled.memory.kv.shape().token_bytes() * BLOCK_TOKENS as u64;
        let arguments = KvArguments { blocks, model: model.clone(), block_bytes };
        let (kv, _) = KvActor::spawn_linked(None, KvActor, arguments, myself.get_cell()).await?;
        self.children.kv = Some(kv.clone());
        let limits = Limits {
            sequences: profiled.record.sequences,
            step_tokens: profiled.record.step_tokens,
            kv_tokens: blocks * BLOCK_TOKENS,
        };
        let lane = profiled.lanes.step.clone();
        self.refuse_a_step_if_due(&lane);
        let refused = self.refusal_sink(myself, WhichLane::Step);
        let arguments = SchedulerArguments { limits, kv: kv.clone(), lane, model, refused };
        let (scheduler, _) = SchedulerActor::spawn_linked(None, SchedulerActor, arguments, myself.get_cell()).await?;
        self.children.scheduler = Some(scheduler.clone());
        let StartPlan { records, .. } = self.plan.clone().expect("planned before served");
        let Planned { processor, context, .. } = self.planned.clone().expect("loaded before served");
        Ok(Serving {
            generation: self.serving_generation(),
            refusals: self.attempts.shrinks(),
            vision: self.children.vision.clone(),
            kv,
            scheduler,
            kv_tokens: limits.kv_tokens,
            context,
            is_warm: records.is_some_and(|records| records.warm().is_some()),
            record: Arc::new(profiled.record.clone()),
            target: processor.target(),
        })
    }

    /// Tells the requests that wait. Whoever waits for the start goes on from here, so all else is told before.
    fn let_in(&mut self, myself: &ActorRef<EngineMessage>, serving: Serving) {
        self.show();
        self.arguments.show(Status::Ready(serving));
        if let Some(elastic) = &mut self.elastic {
            elastic.serving(myself, self.children.scheduler.as_ref());
        }
    }

    fn envelope(&self) -> &Envelope {
        &self.plan.as_ref().expect("planned before served").inputs.envelope
    }

    /// What the size of keys and values is changed with.
    fn elastic_place(&self) -> Place {
        let EngineArguments { label, budget, device, weight_store, .. } = self.arguments.clone();
        let memory = self.profiled.as_ref().expect("sized before served").memory.clone();
        Place { label, memory, budget, device, weight_store, generation: self.owner().generation }
    }

    async fn spawn_vision(
        &self,
        myself: &ActorRef<EngineMessage>,
    ) -> Result<Option<ActorRef<VisionMessage>>, ActorProcessingErr> {
        let profiled = self.profiled.as_ref().expect("sized before served");
        let Planned { model, context, .. } = self.planned.clone().expect("loaded before served");
        let (Some(lane), Some(processors)) = (profiled.lanes.vision.clone(), context.processors.clone()) else {
            return Ok(None);
        };
        let arguments = VisionArguments {
            budget: self.arguments.budget.clone(),
            // Its leases of host memory are held by tasks and end with them, whatever becomes of the actor.
            owner: self.arguments.vision_owner(),
            model_label: self.arguments.label.clone(),
            model,
            processors,
            limits: context.image_limits.clone(),
            lane,
            cache_rows: profiled.record.cache_rows,
            row_bytes: profiled.memory.vision_cache.as_ref().map_or(Bytes::ZERO, VisionCache::row_bytes),
            launch_patches: profiled.record.launch_patches,
            decode_threads: self.arguments.options.threads,
            refused: self.refusal_sink(myself, WhichLane::Vision),
        };
        Ok(Some(VisionActor::spawn_linked(None, VisionActor, arguments, myself.get_cell()).await?.0))
    }

    /// What dead actors left on the lanes ends first: it still writes where their successors will. A lane whose thread
    /// has died starts again on the same memory.
    async fn revive_lanes(&mut self, myself: &ActorRef<EngineMessage>) -> Result<(), ActorProcessingErr> {
        let profiled = self.profiled.clone().expect("sized before served");
        profiled.lanes.idle().await;
        if profiled.lanes.are_alive() {
            return Ok(());
        }
        let Planned { model, processor, .. } = self.planned.clone().expect("loaded before served");
        let (device, memory) = (self.arguments.device.clone(), profiled.memory.clone());
        let place = LanesPlace { processor, device, model, memory };
        let (weight_store, generation) = (&self.arguments.weight_store, self.owner().generation);
        let Some(lanes) = Lanes::start(Some(profiled.lanes.clone()), place, weight_store, generation).await? else {
            return Ok(()); // An end is being put to this engine.
        };
        if let (Some(inputs), false) = (&profiled.memory.graphs, profiled.lanes.step.is_alive()) {
            let captured = inputs.captured().clone();
            let work = recapture(lanes.step.clone(), inputs.shape(), inputs.paid(), captured);
            self.recapture.begin(myself, work, |task, outcome| EngineMessage::Recaptured { task, outcome });
        }
        self.profiled =
            Some(Arc::new(Profiled { lanes, record: profiled.record.clone(), memory: profiled.memory.clone() }));
        Ok(())
    }

    async fn child_died(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        place: usize,
        reason: &str,
    ) -> Result<(), ActorProcessingErr> {
        self.check_device()?;
        self.arguments.show(Status::Starting);
        match self.restarts.died(place.min(KV), self.born.elapsed()) {
            Decision::Restart { children, after } => {
                self.arguments.tell_of_restart(CHILDREN[place], reason);
                for child in self.children.take_from(children.start) {
                    // The dead one answers at once; the others are stopped before a successor starts.
                    drop(child.kill_and_wait(None).await);
                }
                // One that is waited for already is part of this one.
                let first = self.restarting.map_or(children.start, |(_, first)| first.min(children.start));
                if let Some(elastic) = &mut self.elastic {
                    elastic.serving(myself, None);
                }
                self.deaths += 1;
                let restart = self.deaths;
                self.restarting = Some((restart, first));
                myself.send_after(after, move || EngineMessage::Restart { restart });
            }
            Decision::GiveUp { restarts, within } => {
                let reason = format!("{restarts} restarts within {} s, the last after: {reason}", within.as_secs());
                self.arguments.show(Status::Stopped { reason: reason.as_str().into() });
                myself.stop(Some(reason));
            }
        }
        Ok(())
    }
}
