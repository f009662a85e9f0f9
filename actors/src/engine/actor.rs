//! The engine supervisor: starts a model's actors and answers for them.

use std::{sync::Arc, time::Instant};

use bursar_budgets::{Class, Device, Gate, Label, Owner, Priority, Request, Segment};
use bursar_kernels::{Cpu, Target};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointOrigin},
};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;

use super::{
    EngineMessage, Kit, Lanes, LoadOptions, Progress, ProgressSink, Serving, Shelf, StartError, Status, fetch::fetch,
};
use crate::{
    budget::Budget,
    kv::{KvActor, KvArguments, KvMessage},
    profile::{ATTEMPTS_MAX, Attempt, Needs, ProfileActor, ProfileArguments, ProfileError, Profiled},
    scheduler::{Limits, SchedulerActor, SchedulerArguments, SchedulerMessage},
    supervise::{Decision, Policy, RestartLog},
    tree,
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
    pub shelf: Shelf,
    /// How many engines this model has had.
    pub generation: u64,
    /// Where handles look.
    pub status: Arc<watch::Sender<Status>>,
    /// Who watches the start.
    pub progress: ProgressSink,
}

impl EngineArguments {
    /// The owner of the last attempt that this engine could make, and so of all that it holds apart from weights.
    pub(crate) fn last_owner(&self) -> Owner {
        Owner::new(format!("{} engine", self.label), (self.generation + 1) * u64::from(ATTEMPTS_MAX) - 1)
    }

    /// As whom host memory for pictures is leased.
    pub(crate) fn vision_owner(&self) -> Owner {
        Owner::new(format!("{} vision", self.label), self.generation)
    }
}

/// Its state.
pub struct EngineState {
    arguments: EngineArguments,
    planned: Option<Planned>,
    /// Attempts at sizing that have failed.
    attempts: u32,
    /// How many of them for want of memory.
    shrinks: u32,
    profile: Option<ActorCell>,
    profiled: Option<Arc<Profiled>>,
    children: Children,
    restarts: RestartLog,
    born: Instant,
    servings: u64,
    deaths: u64,
    /// A restart that is waited for: its number, and the first of the children that it starts.
    restarting: Option<(u64, usize)>,
}

/// What is known before sizing.
#[derive(Clone)]
struct Planned {
    kit: Arc<Kit>,
    /// Until READY: its corners hold blank pictures, which are large.
    needs: Option<Arc<Needs>>,
    model: Arc<Model>,
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

const CHILDREN: usize = 3;
const KV: usize = 1;

impl Children {
    fn cells(&self) -> [Option<ActorCell>; CHILDREN] {
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
        Ok(EngineState {
            restarts: RestartLog::new(Policy::RestForOne, arguments.options.intensity, CHILDREN),
            arguments,
            planned: None,
            attempts: 0,
            shrinks: 0,
            profile: None,
            profiled: None,
            children: Children::default(),
            born: Instant::now(),
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
            EngineMessage::Begin => match state.plan_and_load().await {
                Ok(planned) => {
                    state.planned = Some(planned);
                    state.start_attempt(&myself).await?;
                }
                Err(error) => state.fail(&myself, error),
            },
            EngineMessage::Profiled { generation, .. } if generation != state.owner().generation => {}
            EngineMessage::Profiled { outcome: Ok(profiled), .. } => {
                state.end_profile();
                state.planned.iter_mut().for_each(|planned| planned.needs = None);
                state.profiled = Some(Arc::new(profiled));
                state.move_gate(Gate::Frozen).await?;
                state.start_children(&myself, 0).await?;
                (state.arguments.progress)(Progress::Ready);
            }
            EngineMessage::Profiled { outcome: Err(error), .. } => {
                state.end_profile();
                state.attempt_failed(&myself, error).await?;
            }
            EngineMessage::Restart { restart } => {
                if let Some((_, first)) = state.restarting.take_if(|(number, _)| *number == restart) {
                    state.start_children(&myself, first).await?;
                }
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<EngineMessage>,
        event: SupervisionEvent,
        state: &mut EngineState,
    ) -> Result<(), ActorProcessingErr> {
        let (cell, reason) = match event {
            SupervisionEvent::ActorFailed(cell, error) => (cell, error.to_string()),
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                (cell, reason.unwrap_or_else(|| "stopped".to_owned()))
            }
            _ => return Ok(()),
        };
        if state.profile.as_ref().is_some_and(|profile| profile.get_id() == cell.get_id()) {
            state.profile = None;
            return state.attempt_failed(&myself, ProfileError::Died { reason }).await;
        }
        // One that was stopped in the course of another's restart is no longer listed.
        let Some(place) = state.children.place(&cell) else { return Ok(()) };
        state.child_died(&myself, place, &reason).await
    }
}

impl EngineState {
    fn target(&self) -> Target {
        Target::Cpu { threads: self.arguments.options.threads }
    }

    async fn plan_and_load(&self) -> Result<Planned, StartError> {
        (self.arguments.progress)(Progress::Planning);
        // After an earlier engine of this name it is frozen; one that is open already stays so.
        drop(self.arguments.budget.move_gate(self.arguments.label.clone(), Gate::Open).await?);
        let (checkpoint, kit, needs) = self.plan().await?;
        let model = match self.arguments.shelf.model() {
            // Rule 10: weights that are still on the device are not loaded again.
            Some(model) => model,
            None => {
                if let Some(unfinished) = self.arguments.shelf.take_unfinished() {
                    self.arguments.budget.clear(unfinished).await?;
                }
                let model = Arc::new(self.load(checkpoint, needs.clone()).await?);
                self.arguments.shelf.keep_model(model.clone());
                model
            }
        };
        Ok(Planned { kit, needs: Some(needs), model })
    }

    async fn plan(&self) -> Result<(Arc<Checkpoint>, Arc<Kit>, Arc<Needs>), StartError> {
        let source = fetch(self.arguments.source.clone(), self.arguments.progress.clone()).await?;
        let options = self.arguments.options.clone();
        let (name, target, page) = (self.arguments.label.to_string(), self.target(), self.arguments.device.page());
        // Weights that are there already have been weighed.
        let available = match self.arguments.shelf.model() {
            Some(_) => None,
            None => Some(self.arguments.budget.available().await?),
        };
        off_actor(move || {
            let checkpoint = Checkpoint::open(source)?;
            let model = Model::plan(&checkpoint)?;
            let kit = Kit::new(name, &checkpoint, model.config().clone(), &options)?;
            let needs = Needs::plan(&model, target, &kit.envelope, page)?;
            if let Some(available) = available {
                needs.fits(&model, target, &kit.envelope, available)?;
            }
            Ok((Arc::new(checkpoint), Arc::new(kit), Arc::new(needs)))
        })
        .await
    }

    async fn load(&self, checkpoint: Arc<Checkpoint>, needs: Arc<Needs>) -> Result<Model, StartError> {
        let EngineArguments { label, budget, device, progress, .. } = self.arguments.clone();
        // The weights outlive engines, so no engine owns them.
        let owner = Owner::new(format!("{label} weights"), self.arguments.generation);
        let loading = self.arguments.shelf.begin_loading(self.owner().generation, owner.clone());
        let loading = loading.ok_or_else(|| StartError::Died("its engine has ended".to_owned()))?;
        let request = Request::new(owner, Class::Weights, label, needs.weights).priority(Priority::Startup);
        let lease = budget.ask(tree::LEASE_FOR_ENGINE, request, false).await?;
        off_actor(move || {
            let _loading = loading;
            let segment = Segment::reserve(device, needs.weights, lease)?;
            segment.back_to(needs.weights)?;
            // Copies need no threads of their own.
            let progress = |done, total| progress(Progress::Loading { done, total });
            Ok(Model::load(&checkpoint, &Cpu::new(1), segment, progress)?)
        })
        .await
    }

    /// The owner of everything that an attempt leases, and that serving then lives on.
    fn owner(&self) -> Owner {
        let generation = self.arguments.generation * u64::from(ATTEMPTS_MAX) + u64::from(self.attempts);
        Owner::new(format!("{} engine", self.arguments.label), generation)
    }

    async fn start_attempt(&mut self, myself: &ActorRef<EngineMessage>) -> Result<(), ActorProcessingErr> {
        let Planned { kit, needs, model } = self.planned.clone().expect("the plan comes before an attempt");
        let options = &self.arguments.options;
        let attempt = Attempt {
            budget: self.arguments.budget.clone(),
            device: self.arguments.device.clone(),
            owner: self.owner(),
            label: self.arguments.label.clone(),
            model,
            needs: needs.expect("the needs are kept until READY"),
            envelope: kit.envelope.clone(),
            memory_fraction: options.memory_fraction,
            kv_tokens: options.kv_tokens,
            shrinks: self.shrinks,
            threads: options.threads,
            progress: self.arguments.progress.clone(),
            shelf: self.arguments.shelf.clone(),
        };
        let arguments = ProfileArguments { attempt, engine: myself.clone() };
        let (profile, _) = ProfileActor::spawn_linked(None, ProfileActor, arguments, myself.get_cell()).await?;
        self.profile = Some(profile.get_cell());
        Ok(())
    }

    fn end_profile(&mut self) {
        if let Some(profile) = self.profile.take() {
            profile.stop(None);
        }
    }

    /// What the attempt held is brought home first; then a smaller one, or the end.
    async fn attempt_failed(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        error: ProfileError,
    ) -> Result<(), ActorProcessingErr> {
        self.arguments.shelf.quench(self.owner().generation).await;
        self.arguments.budget.clear(self.owner()).await?;
        self.attempts += 1;
        self.shrinks += u32::from(error.is_out_of_memory());
        if (error.is_out_of_memory() || error.is_death()) && self.attempts < ATTEMPTS_MAX {
            return self.start_attempt(myself).await;
        }
        self.fail(myself, StartError::Profile { attempt: self.attempts, source: error });
        Ok(())
    }

    fn fail(&self, myself: &ActorRef<EngineMessage>, error: StartError) {
        self.arguments.status.send_replace(Status::Failed(Arc::new(error)));
        myself.stop(None);
    }

    async fn move_gate(&self, to: Gate) -> Result<(), ActorProcessingErr> {
        self.arguments.budget.move_gate(self.arguments.label.clone(), to).await??;
        Ok(())
    }

    /// Starts the serving actors from `first` on, and tells the requests that wait.
    async fn start_children(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        first: usize,
    ) -> Result<(), ActorProcessingErr> {
        self.revive_lanes().await;
        if first == 0 {
            self.children.vision = self.spawn_vision(myself).await?;
        }
        let profiled = self.profiled.clone().expect("sized before served");
        let model = self.arguments.label.clone();
        let arguments = KvArguments { blocks: profiled.record.kv_blocks, model: model.clone() };
        let (kv, _) = KvActor::spawn_linked(None, KvActor, arguments, myself.get_cell()).await?;
        self.children.kv = Some(kv.clone());
        let limits = Limits {
            sequences: profiled.record.sequences,
            step_tokens: profiled.record.step_tokens,
            kv_tokens: profiled.record.kv_tokens(),
        };
        let arguments = SchedulerArguments { limits, kv: kv.clone(), lane: profiled.lanes.step.clone(), model };
        let (scheduler, _) = SchedulerActor::spawn_linked(None, SchedulerActor, arguments, myself.get_cell()).await?;
        self.children.scheduler = Some(scheduler.clone());
        self.servings += 1;
        let Planned { kit, .. } = self.planned.clone().expect("planned before served");
        self.arguments.status.send_replace(Status::Ready(Serving {
            generation: self.arguments.generation << 32 | self.servings,
            vision: self.children.vision.clone(),
            kv,
            scheduler,
            kit,
            record: Arc::new(profiled.record.clone()),
        }));
        Ok(())
    }

    async fn spawn_vision(
        &self,
        myself: &ActorRef<EngineMessage>,
    ) -> Result<Option<ActorRef<VisionMessage>>, ActorProcessingErr> {
        let profiled = self.profiled.as_ref().expect("sized before served");
        let Planned { kit, model, .. } = self.planned.clone().expect("planned before served");
        let (Some(lane), Some(processors)) = (profiled.lanes.vision.clone(), kit.processors.clone()) else {
            return Ok(None);
        };
        let arguments = VisionArguments {
            budget: self.arguments.budget.clone(),
            // Its leases of host memory are held by tasks and end with them, whatever becomes of the actor.
            owner: self.arguments.vision_owner(),
            model_label: self.arguments.label.clone(),
            model,
            processors,
            limits: kit.image_limits.clone(),
            lane,
            cache_rows: profiled.record.cache_rows,
            launch_patches: profiled.record.launch_patches,
            decode_threads: self.arguments.options.threads,
        };
        Ok(Some(VisionActor::spawn_linked(None, VisionActor, arguments, myself.get_cell()).await?.0))
    }

    /// What dead actors left on the lanes ends first: it still writes where their successors will. A lane whose thread
    /// has died starts again on the same memory.
    async fn revive_lanes(&mut self) {
        let profiled = self.profiled.clone().expect("sized before served");
        profiled.lanes.idle().await;
        if profiled.lanes.are_alive() {
            return;
        }
        let Planned { model, .. } = self.planned.clone().expect("planned before served");
        let (device, threads) = (&self.arguments.device, self.arguments.options.threads);
        let lanes = Lanes::start_beside(Some(&profiled.lanes), device, &model, &profiled.memory, threads);
        if !self.arguments.shelf.keep_lanes(self.owner().generation, lanes.clone()) {
            return; // An end is being put to this engine.
        }
        self.profiled =
            Some(Arc::new(Profiled { lanes, record: profiled.record.clone(), memory: profiled.memory.clone() }));
    }

    async fn child_died(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        place: usize,
        reason: &str,
    ) -> Result<(), ActorProcessingErr> {
        self.arguments.status.send_replace(Status::Starting);
        metrics::counter!("bursar_restarts", "model" => self.arguments.label.to_string()).increment(1);
        match self.restarts.died(place.min(KV), self.born.elapsed()) {
            Decision::Restart { children, after } => {
                for child in self.children.take_from(children.start) {
                    // The dead one answers at once; the others are stopped before a successor starts.
                    drop(child.kill_and_wait(None).await);
                }
                // One that is waited for already is part of this one.
                let first = self.restarting.map_or(children.start, |(_, first)| first.min(children.start));
                self.deaths += 1;
                let restart = self.deaths;
                self.restarting = Some((restart, first));
                myself.send_after(after, move || EngineMessage::Restart { restart });
            }
            Decision::GiveUp { restarts, within } => {
                let reason = format!("{restarts} restarts within {} s, the last after: {reason}", within.as_secs());
                self.arguments.status.send_replace(Status::Stopped { reason: reason.as_str().into() });
                myself.stop(Some(reason));
            }
        }
        Ok(())
    }
}

/// Runs blocking work on a thread of its own.
async fn off_actor<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(died) => Err(StartError::Died(died.to_string())),
    }
}
