//! The runtime supervisor actor.

mod budget;
mod effects;
mod loss;
mod memory;
mod show;
mod sleep_tasks;
mod start;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, Device, Label, LedgerConfig};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::{
    sync::{MappedMutexGuard, Mutex, MutexGuard},
    task::JoinSet,
};

use self::budget::{BudgetSettings, ClosingMailbox};
use super::{
    Health, MakeDevice, ModelHealth, RuntimeMessage, Shown, Supervised,
    core::{Input, Load, Rules, RuntimeCore, Shutdown},
    message::ActorParts,
};
use crate::{
    budget::{BudgetMailbox, WatchOptions},
    credit::Credits,
    engine::{EngineArguments, Status},
    metric::{self, Architecture, Dtype, KvCacheDtype, Quantization},
    shared::carry_out::CarryOut,
    sleep::{SleepOrder, WakeState},
    supervise::{Intensity, end_of},
    token_interval::GpuLoad,
};

/// The supervisor of one device's budget and engines.
///
/// The state is in this field and not in ractor's `State`, because ractor moves an actor's `State`
/// into the event that reports the actor's end, and that event may stay in the mailbox of a user's
/// supervisor for a long time. The chats and memory in the state would stay alive until the
/// supervisor reads the event. A chat that the supervisor itself waits for would then never end.
#[derive(Default)]
pub struct RuntimeActor(Mutex<Option<RuntimeState>>);

impl RuntimeActor {
    /// Locks the state. Only one handler runs at a time, so the lock is always free.
    async fn state(&self) -> MappedMutexGuard<'_, RuntimeState> {
        MutexGuard::map(self.0.lock().await, |state| state.as_mut().expect("the state is set before the first message"))
    }
}

pub struct RuntimeArguments {
    /// The device, and the channel on which its successors are published.
    pub shown: Shown,
    /// Creates a successor for a lost device. If this is `None`, the runtime ends with its device.
    pub again: Option<MakeDevice>,
    /// How many losses of the device the runtime survives, and within what time.
    pub device_intensity: Intensity,
    pub ledger: LedgerConfig,
    /// Bytes of the device kept free on purpose.
    pub canary: Bytes,
    /// The mailbox to which leases post their notes.
    pub mailbox: Arc<BudgetMailbox>,
    /// How many restarts of the budget are tolerated, and within what time.
    pub budget_intensity: Intensity,
    pub watch: WatchOptions,
    /// If set, models are put to sleep to free memory for other models. A model with requests stays
    /// awake for at least this long.
    pub turn: Option<Duration>,
}

pub struct RuntimeState {
    core: RuntimeCore<ActorParts>,
    shown: Shown,
    again: Option<MakeDevice>,
    settings: BudgetSettings,
    budget: ActorCell,
    /// Load of all models on the device.
    card: Arc<GpuLoad>,
    engines: BTreeMap<String, Engine>,
    /// Models that were READY and then ended by themselves. An entry stays until the model is
    /// unloaded or a model of this name is loaded again.
    dead_models: BTreeMap<String, Known>,
    /// The next check for idle models, if a check is due before the regular check that runs once a
    /// second.
    look: JoinSet<()>,
    born: Instant,
}

/// A model and its current engine.
struct Engine {
    cell: ActorCell,
    arguments: EngineArguments,
    /// Credits of the model's running requests.
    requests: Credits,
    /// Labels of the model's info gauge. `None` until the model is READY for the first time.
    known: Option<Known>,
}

impl Engine {
    /// Returns the engine's actor, and the arguments that identify its memory.
    fn place(&self) -> (ActorCell, EngineArguments) {
        (self.cell.clone(), self.arguments.clone())
    }
}

/// A model that was READY once, with the labels of its info gauge.
#[derive(Clone)]
struct Known(Label, Architecture, Dtype, Quantization, KvCacheDtype);

impl Known {
    /// Sets whether the info gauge shows the model as loaded.
    fn show(&self, is_there: bool) {
        let Known(model, architecture, dtype, quantization, kv_cache_dtype) = self.clone();
        metric::MODEL_INFO.set(&(model, architecture, dtype, quantization, kv_cache_dtype), is_there);
    }

    /// Shows that no actor of the model runs.
    fn show_dead(&self) {
        metric::forget_model(&self.0);
        self.show(true);
    }
}

impl Actor for RuntimeActor {
    type Msg = RuntimeMessage;
    type State = ();
    type Arguments = RuntimeArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<RuntimeMessage>,
        arguments: RuntimeArguments,
    ) -> Result<(), ActorProcessingErr> {
        let RuntimeArguments { shown, again, device_intensity, ledger, canary, mailbox, budget_intensity, watch, turn } =
            arguments;
        let rules = Rules { budget: budget_intensity, device: device_intensity, has_successor: again.is_some(), turn };
        let settings = BudgetSettings { ledger, canary, mailbox: ClosingMailbox(mailbox), watch };
        let device = shown.device.borrow().clone();
        let budget = settings.spawn(&myself, &device).await?;
        myself.send_message(RuntimeMessage::Show)?;
        *self.0.lock().await = Some(RuntimeState {
            core: RuntimeCore::new(rules),
            shown,
            again,
            settings,
            budget,
            card: Arc::default(),
            engines: BTreeMap::new(),
            dead_models: BTreeMap::new(),
            look: JoinSet::new(),
            born: Instant::now(),
        });
        Ok(())
    }

    /// Handles a message. This function never waits for an answer of the budget actor, because the
    /// runtime actor must be able to restart the budget actor at any time.
    async fn handle(
        &self,
        myself: ActorRef<RuntimeMessage>,
        message: RuntimeMessage,
        (): &mut (),
    ) -> Result<(), ActorProcessingErr> {
        let mut state = self.state().await;
        if let Some(input) = state.input_of(&myself, message)? {
            state.step(&myself, input).await?;
        }
        state.show();
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RuntimeMessage>,
        event: SupervisionEvent,
        (): &mut (),
    ) -> Result<(), ActorProcessingErr> {
        let Some((cell, reason)) = end_of(event) else { return Ok(()) };
        let mut state = self.state().await;
        if let Some(input) = state.death(&cell, reason) {
            state.step(&myself, input).await?;
        }
        state.show();
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<RuntimeMessage>, (): &mut ()) -> Result<(), ActorProcessingErr> {
        let mut state = self.state().await;
        let Some(Shutdown { waiters, cut_off }) = state.core.take_shutdown() else { return Ok(()) };
        // The callers that wait for the shutdown are answered below. All other callers that wait
        // for an answer get the error that the runtime has ended.
        drop(state.budget.kill_and_wait(None).await);
        state.settings.mailbox().close();
        drop(state);
        // Dropping the state resets the gauges. Drop it before the callers learn that the runtime
        // has ended.
        drop(self.0.lock().await.take());
        waiters.into_iter().for_each(|waiter| waiter(cut_off));
        Ok(())
    }
}

impl RuntimeState {
    fn device(&self) -> Arc<dyn Device> {
        self.shown.device.borrow().clone()
    }

    /// Returns the input of the core that a message contains or is translated into. Messages that
    /// the core does not need are handled here.
    fn input_of(
        &self,
        myself: &ActorRef<RuntimeMessage>,
        message: RuntimeMessage,
    ) -> Result<Option<Input<ActorParts>>, ActorProcessingErr> {
        Ok(Some(match message {
            RuntimeMessage::Input(input) => input,
            RuntimeMessage::Load { name, request } => {
                let (intensity, sleep_after) = (request.options.engine_intensity, request.options.sleep_after);
                Input::Load(Load { name, intensity, sleep_after, request })
            }
            RuntimeMessage::Unload { name, within, reply } => {
                Input::Unload { name, within, waiter: Box::new(move |cut_off| reply.answer(cut_off)) }
            }
            // A loss that was reported for a predecessor of this device is ignored.
            RuntimeMessage::DeviceLost => return Ok(self.loss().map(Input::DeviceLost)),
            RuntimeMessage::ShutDown { within, reply } => {
                Input::ShutDown { within, waiter: Box::new(move |cut_off| reply.answer(cut_off)) }
            }
            RuntimeMessage::Supervised(reply) => {
                let engines = self.engines.iter().map(|(name, engine)| (name.clone(), engine.cell.clone()));
                reply.answer(Supervised { budget: self.budget.clone(), engines: engines.collect() });
                return Ok(None);
            }
            RuntimeMessage::Health(reply) => {
                reply.answer(self.health());
                return Ok(None);
            }
            RuntimeMessage::SleepOrder { name, load, order: SleepOrder::Sleep { level, within, reply } } => {
                Input::Sleep { name, load, level, within, sleeper: reply }
            }
            RuntimeMessage::SleepOrder { name, load, order: SleepOrder::Wake(reason) } => {
                Input::Wake { name, load, reason }
            }
            RuntimeMessage::CheckIdle => Input::IdleReports(self.seen()),
            RuntimeMessage::Show => {
                myself.send_after(metric::SHOWN_EVERY, || RuntimeMessage::Show);
                Input::IdleReports(self.seen())
            }
            RuntimeMessage::InjectFault(fault) => return Err(fault.inject().into()),
        }))
    }

    /// Translates the end of an actor into an input of the core.
    fn death(&self, cell: &ActorCell, reason: String) -> Option<Input<ActorParts>> {
        if cell.get_id() == self.budget.get_id() {
            return Some(Input::BudgetDied { reason });
        }
        let (name, engine) = self.engines.iter().find(|(_, engine)| engine.cell.get_id() == cell.get_id())?;
        let name = name.clone();
        // An engine that ends by itself has already published a reason: its start failed, or it
        // gave up. Any other end is a death, including a stop from outside.
        match &*engine.arguments.status.borrow() {
            status if status.is_over() => return Some(Input::EngineGaveUp { name, reason }),
            Status::NotWoken(error) => {
                let may_fit = self.may_fit(&name, error);
                return Some(Input::NotWoken { name, may_fit });
            }
            _ => {}
        }
        Some(self.loss().map_or(Input::EngineDied { name, reason }, Input::DeviceLost))
    }

    fn health(&self) -> Health {
        let health = |name: &str, engine: &Engine| match &*engine.arguments.status.borrow() {
            _ if self.core.is_forgotten(name) => ModelHealth::Leaving,
            _ if matches!(engine.arguments.wakefulness.state(), WakeState::Asleep(_)) => ModelHealth::Asleep,
            Status::Starting | Status::NotWoken(_) => ModelHealth::Starting,
            Status::Ready(_) => ModelHealth::Ready,
            Status::Failed(_) | Status::Stopped { .. } => ModelHealth::Stopped,
        };
        let dead_models = self.dead_models.keys().map(|name| (name.clone(), ModelHealth::Stopped));
        let engines = self.engines.iter().map(|(name, engine)| (name.clone(), health(name, engine)));
        Health { is_live: true, models: dead_models.chain(engines).collect() }
    }
}
