//! The engine actor, which starts a model's actors and restarts them.

mod children;
mod effects;
mod show;
mod spawn;

use std::{sync::Arc, time::Instant};

use bursar_budgets::DeviceError;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};

pub use self::children::ActorParts;
use self::children::{CHILDREN, Children};
use super::{
    EngineArguments, EngineMessage, WhichLane, core,
    core::{EngineCore, Input, Rules, Sized, SizedBy},
    elastic::{PoolInput, ResizeContext},
    start::{LoadError, LoadFailed, LoadedModel, StartPlan},
};
use crate::{
    budget::SharedKvDemand,
    capture::Recaptured,
    compute::lane::{Job, Lane},
    metric,
    profile::{AttemptProgress, Evidence, Phase, Profiled},
    scheduler::SchedulerMessage,
    shared::carry_out::CarryOut,
    supervise::{BackgroundTask, Latest, end_of},
};

/// The supervisor of one model's actors.
pub struct EngineActor;

pub struct EngineState {
    arguments: EngineArguments,
    core: EngineCore<ActorParts>,
    /// The progress of the current attempt. The attempt updates it.
    attempt_progress: AttemptProgress,
    profile: Option<ActorCell>,
    /// The task that plans and loads, or finds the knobs that would make the model fit.
    task: Option<BackgroundTask>,
    /// The resize of the KV cache in progress.
    change: Option<BackgroundTask>,
    /// Demand for KV cache memory. `None` if the user fixed the size of the cache.
    demand: Option<Arc<SharedKvDemand>>,
    /// The task that captures graphs on a new lane. Until a size is captured, the lane launches
    /// decode steps of that size kernel by kernel.
    recapture: Latest,
    born: Instant,
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
        myself.send_message(EngineMessage::Input(Input::Attempt { attempt: 0 }))?;
        myself.send_message(EngineMessage::Show)?;
        let options = &arguments.options;
        let rules = Rules {
            intensity: options.intensity,
            children: CHILDREN.len(),
            is_pinned: options.kv().is_pinned(),
            faults: options.faults.clone(),
        };
        let demand = (!rules.is_pinned).then(|| Arc::new(arguments.budget.kv_demand()));
        Ok(EngineState {
            demand,
            arguments,
            core: EngineCore::new(rules),
            attempt_progress: AttemptProgress::default(),
            profile: None,
            task: None,
            change: None,
            recapture: Latest::default(),
            born: Instant::now(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<EngineMessage>,
        message: EngineMessage,
        state: &mut EngineState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            EngineMessage::Input(input) => state.step(&myself, input).await?,
            EngineMessage::Loaded(outcome) => {
                let input = state.loaded(outcome?).await;
                state.step(&myself, input).await?;
            }
            EngineMessage::Profiled { attempt, least_blocks, outcome } => {
                let outcome = outcome.map(|profiled| state.sized(attempt, least_blocks, profiled));
                state.step(&myself, Input::Profiled { attempt, outcome }).await?;
            }
            EngineMessage::Advised(knobs) => state.step(&myself, Input::Advised(knobs?)).await?,
            EngineMessage::Recaptured { task, .. } if !state.recapture.reported(task) => {}
            // A failed capture is only counted, because steps of a size that was not captured are
            // launched kernel by kernel. If the lane has died, its scheduler reports the death, and
            // the next lane captures again.
            EngineMessage::Recaptured { outcome, .. } => {
                if !matches!(outcome?, Ok(Recaptured::All)) {
                    metric::GRAPHS_NOT_RECAPTURED_TOTAL.add(&state.arguments.label, 1);
                }
            }
            EngineMessage::Ordered(order) => {
                if let Some(sized) = state.core.serving().map(core::Serving::sized) {
                    let input = Input::Pool(state.resize_context(sized).input(order));
                    state.step(&myself, input).await?;
                }
            }
            EngineMessage::PoolChanged(outcome) => {
                let outcome = outcome?;
                if outcome.is_err() {
                    state.check_device()?;
                }
                state.change = None;
                state.step(&myself, Input::Pool(PoolInput::Ended(outcome?))).await?;
            }
            EngineMessage::Show => drop(myself.send_after(metric::SHOWN_EVERY, || EngineMessage::Show)),
            EngineMessage::InjectFault(fault) => return Err(fault.inject().into()),
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
        // `end_of` drops the event before the next effects are executed, because the event owns the
        // dead actor's state, which may hold running work.
        let Some((cell, reason)) = end_of(event) else { return Ok(()) };
        if state.profile.take_if(|profile| profile.get_id() == cell.get_id()).is_some() {
            state.show();
            state.step(&myself, Input::ProfileDied { reason }).await?;
        } else if let Some(death) = state.children().and_then(|children| children.death(&cell, reason)) {
            state.step(&myself, death).await?;
        }
        state.show();
        Ok(())
    }
}

impl EngineState {
    fn children(&self) -> Option<&Children> {
        self.core.serving().and_then(core::Serving::children)
    }

    /// The current scheduler. `None` while it is being replaced.
    fn scheduler(&self) -> Option<&ActorRef<SchedulerMessage>> {
        self.children().and_then(|children| children.scheduler.as_ref())
    }

    /// Returns a lane of the model, which may be serving or still being sized. Returns `None` if
    /// the lane does not exist.
    fn lane(&self, which: WhichLane) -> Option<Lane> {
        let lanes = self.arguments.weight_store.lanes()?;
        match which {
            WhichLane::Step => Some(lanes.step),
            WhichLane::Vision => lanes.vision,
        }
    }

    /// Fails if the device is lost. Retrying would be useless then, so this engine dies and the
    /// runtime takes over. The check calls the driver, because the driver reports a fault in a
    /// kernel only in the next call.
    fn check_device(&self) -> Result<(), DeviceError> {
        match self.arguments.device.memory() {
            Err(error) if error.is_lost() => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the state that a resize of the KV cache needs.
    fn resize_context(&self, sized: SizedBy<ActorParts>) -> ResizeContext {
        let EngineArguments { label, budget, device, weight_store, .. } = self.arguments.clone();
        let (memory, generation) = (sized.profiled.memory.clone(), self.arguments.owner(sized.attempt).generation);
        ResizeContext { label, memory, budget, device, weight_store, generation, demand: self.demand.clone() }
    }

    /// Converts the outcome of planning and loading to an input.
    async fn loaded(&self, outcome: Result<LoadedModel, LoadFailed>) -> Input<ActorParts> {
        match outcome {
            Ok(LoadedModel { plan, needs, loaded }) => Input::Loaded { plan: plan.into(), needs, loaded },
            Err(LoadFailed { error: LoadError::Start(error), .. }) => Input::LoadFailed(error),
            Err(LoadFailed { plan, error: LoadError::Refused(error) }) => {
                let ledger = self.arguments.budget.measure_after_refusal().await.ok();
                self.attempt_progress.end_in(Phase::Load, Evidence::of(&error, Phase::Load, ledger.as_ref()));
                Input::LoadRefused { plan: plan.map(Into::into), error }
            }
        }
    }

    /// Converts the result of an attempt to the input of the state machine. `least_blocks` is the
    /// smallest KV cache with which every request can still finish.
    fn sized(&self, attempt: u32, least_blocks: usize, profiled: Profiled) -> Sized<ActorParts> {
        let (blocks, profiled) = (profiled.memory.kv.blocks(), Arc::new(profiled));
        let context = self.resize_context(SizedBy { profiled: profiled.clone(), attempt });
        let (floor, limit) = (context.whole_pages(least_blocks), context.limit(blocks));
        Sized { profiled, floor, blocks, limit, passed: self.attempt_progress.passed() }
    }
}

impl From<StartPlan> for core::Planned<ActorParts> {
    fn from(plan: StartPlan) -> Self {
        let is_written = plan.records.as_ref().is_some_and(|records| records.warm().is_some());
        let is_warm = is_written || plan.woken.is_some();
        core::Planned { blocks: plan.expected_blocks, is_warm, plan }
    }
}
