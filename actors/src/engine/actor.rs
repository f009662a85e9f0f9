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
    metric,
    profile::{AttemptReport, Attempts, Course, ProfileError, Profiled},
    scheduler::{Limits, SchedulerActor, SchedulerArguments, SchedulerMessage},
    supervise::{BackgroundTask, Decision, Latest, Policy, RestartLog, end_of},
    tree::Role,
    vision::{VisionActor, VisionArguments, VisionMessage},
};

/// The supervisor of one model.
pub struct EngineActor;

/// The arguments of an engine.
#[derive(Clone)]
pub struct EngineArguments {
    /// The model's name.
    pub label: Label,
    /// The source of its files.
    pub source: CheckpointOrigin,
    /// The options that the user chose.
    pub options: LoadOptions,
    /// The budget that grants its leases.
    pub budget: Budget,
    /// The device that backs its memory.
    pub device: Arc<dyn Device>,
    /// Weights, lanes and kernels that outlive this engine.
    pub weight_store: WeightStore,
    /// The number of this engine among the model's engines.
    pub generation: u64,
    /// The channel on which handles see the model's status.
    pub status: Arc<watch::Sender<Status>>,
    /// Called for each step of the start.
    pub progress: ProgressSink,
}

/// The state of an engine.
pub struct EngineState {
    arguments: EngineArguments,
    /// Planning and loading, while they run.
    task: Option<BackgroundTask>,
    /// Capturing graphs on a new lane. Until it ends, the lane decodes launch by launch.
    recapture: Latest,
    /// The plan of the latest attempt that got that far, whether or not its weights were loaded.
    plan: Option<StartPlan>,
    planned: Option<Planned>,
    attempts: Attempts,
    /// A report for each attempt that has ended, and for the one that serves.
    reports: Vec<AttemptReport>,
    /// The progress of the current attempt.
    course: Course,
    /// Finding which knobs would make the model fit, for the error that ends its start.
    advice: Option<BackgroundTask>,
    /// The attempt that owns what serving uses. Later attempts that only shrink the cache keep this owner.
    served_by: Option<u32>,
    /// The start of serving actors that created the vision actor, which can outlive the scheduler.
    vision_since: u64,
    /// Serving was refused memory, and starts again once keys and values have shrunk.
    is_redoing: bool,
    /// The last attempt in which a fault plan refused a step memory.
    injected: Option<u32>,
    profile: Option<ActorCell>,
    profiled: Option<Arc<Profiled>>,
    /// The size of keys and values, from READY on.
    elastic: Option<Elastic>,
    children: Children,
    restarts: RestartLog,
    born: Instant,
    /// When the latest attempt began.
    attempted: Instant,
    /// How long the latest successful attempt took.
    sized_within: Option<Duration>,
    servings: u64,
    deaths: u64,
    /// The pending restart: its number, and the first child that it starts.
    restarting: Option<(u64, usize)>,
}

/// The serving actors, in start order. The scheduler's sequences may point at pictures that vision handed out, so
/// vision's death also ends the scheduler.
#[derive(Default)]
struct Children {
    vision: Option<ActorRef<VisionMessage>>,
    scheduler: Option<ActorRef<SchedulerMessage>>,
}

/// The roles of the children, by place.
const CHILDREN: [Role; 2] = [Role::Vision, Role::Scheduler];

impl Children {
    fn cells(&self) -> [Option<ActorCell>; CHILDREN.len()] {
        [self.vision.as_ref().map(ActorRef::get_cell), self.scheduler.as_ref().map(ActorRef::get_cell)]
    }

    fn place(&self, cell: &ActorCell) -> Option<usize> {
        self.cells().iter().position(|child| child.as_ref().is_some_and(|child| child.get_id() == cell.get_id()))
    }

    /// Forgets the children from `first` on. Returns those that may still be alive, last first.
    fn take_from(&mut self, first: usize) -> Vec<ActorCell> {
        let cells = self.cells();
        if first == 0 {
            self.vision = None;
        }
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
                // The budget hears of it before it answers for the gate, so that READY needs nothing more of it.
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
            // Sizes that were not captured are run launch by launch. If the lane died, its scheduler hears of it, and
            // the next lane captures again.
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
        // The event carries the dead actor's state. Drop that first, because it may hold running work.
        let Some((cell, reason)) = end_of(event) else { return Ok(()) };
        if state.profile.as_ref().is_some_and(|profile| profile.get_id() == cell.get_id()) {
            state.profile = None;
            state.show();
            state.attempt_failed(&myself, ProfileError::Died { reason }).await?;
        } else if let Some(place) = state.children.place(&cell) {
            // A child that was stopped for another's restart is no longer listed here.
            state.child_died(&myself, place, &reason).await?;
        }
        state.show();
        Ok(())
    }
}

impl EngineState {
    /// The owner of everything that this attempt leases, and that serving then uses.
    fn owner(&self) -> Owner {
        self.arguments.owner(self.served_by.unwrap_or(self.attempts.number()))
    }

    /// The generation of the actors that serve, or are about to.
    fn serving_generation(&self) -> u64 {
        self.arguments.generation << 32 | self.servings
    }

    /// A lane of the model that serves or is being sized.
    fn lane(&self, which: WhichLane) -> Option<Lane> {
        let lanes = self.arguments.weight_store.lanes()?;
        match which {
            WhichLane::Step => Some(lanes.step),
            WhichLane::Vision => lanes.vision,
        }
    }

    /// Fails if the device is lost: retrying would be useless, so this engine dies and the runtime takes over. It asks
    /// the driver, because a kernel's fault is reported only on the next call.
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
        let limits = Limits {
            sequences: profiled.record.sequences,
            step_tokens: profiled.record.step_tokens,
            kv_tokens: blocks * BLOCK_TOKENS,
        };
        let lane = profiled.lanes.step.clone();
        self.refuse_a_step_if_due(&lane);
        let refused = self.refusal_sink(myself, WhichLane::Step);
        let arguments = SchedulerArguments { limits, lane, model, block_bytes, refused };
        let (scheduler, _) = SchedulerActor::spawn_linked(None, SchedulerActor, arguments, myself.get_cell()).await?;
        self.children.scheduler = Some(scheduler.clone());
        let StartPlan { records, .. } = self.plan.clone().expect("planned before served");
        let Planned { processor, context, .. } = self.planned.clone().expect("loaded before served");
        Ok(Serving {
            generation: self.serving_generation(),
            refusals: self.attempts.shrinks(),
            vision: self.children.vision.clone(),
            scheduler,
            kv_tokens: limits.kv_tokens,
            context,
            is_warm: records.is_some_and(|records| records.warm().is_some()),
            record: Arc::new(profiled.record.clone()),
            target: processor.target(),
        })
    }

    /// Publishes READY to waiting requests. They go on from here, so everything else is published first.
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

    /// What a change of the cache's size works with.
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
            // Tasks hold its leases of host memory, which end with them even if the actor dies first.
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

    /// Waits for the jobs that dead actors left on the lanes, because these still write where successors will. A lane
    /// whose thread has died starts again on the same memory.
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
            return Ok(()); // This engine is being ended.
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
        match self.restarts.died(place, self.born.elapsed()) {
            Decision::Restart { children, after } => {
                self.arguments.tell_of_restart(CHILDREN[place], reason);
                for child in self.children.take_from(children.start) {
                    // The dead child answers at once. The others are stopped before any successor starts.
                    drop(child.kill_and_wait(None).await);
                }
                // A restart already pending becomes part of this one.
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
