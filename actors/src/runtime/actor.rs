//! The runtime supervisor.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, Device, Gate, Label, LedgerConfig};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::{oneshot, watch};

use super::{
    Health, Home, MakeDevice, ModelHealth, RuntimeMessage, Shown, Supervised,
    show::{Known, no_model},
};
use crate::{
    budget::{Budget, BudgetActor, BudgetArguments, BudgetMailbox, NO_MODEL, OnLoss, WatchOptions},
    chat::{ChatError, ModelHandle},
    credit::Credits,
    engine::{EngineActor, EngineArguments, StartError, Status, WeightStore},
    event::Event,
    metric,
    responder::Responder,
    supervise::{Decision, Intensity, Policy, RestartLog, end_of},
    tree::Role,
};

/// The supervisor of one device's budget and engines.
pub struct RuntimeActor;

/// The arguments of a runtime supervisor.
pub struct RuntimeArguments {
    /// The device, and the channel on which its successors are published.
    pub shown: Shown,
    /// Makes a successor for a lost device. Without it the runtime ends with its device.
    pub again: Option<MakeDevice>,
    /// How many losses of the device the runtime survives, and within what time.
    pub device_intensity: Intensity,
    /// The totals of the device's ledger.
    pub ledger: LedgerConfig,
    /// Bytes of the device kept free on purpose.
    pub canary: Bytes,
    /// The mailbox in which leases post their notes.
    pub mailbox: Arc<BudgetMailbox>,
    /// How many restarts of the budget are tolerated, and within what time.
    pub budget_intensity: Intensity,
    /// How the budget watches the device.
    pub watch: WatchOptions,
}

/// The state of a runtime supervisor.
pub struct RuntimeState {
    pub(super) shown: Shown,
    pub(super) again: Option<MakeDevice>,
    pub(super) device_losses: RestartLog,
    /// The device is lost, and everything on it is being ended.
    pub(super) is_lost: bool,
    pub(super) ledger: LedgerConfig,
    pub(super) canary: Bytes,
    pub(super) mailbox: ClosingMailbox,
    pub(super) watch: WatchOptions,
    pub(super) budget: ActorCell,
    budget_restarts: RestartLog,
    pub(super) engines: BTreeMap<String, Engine>,
    /// Models that were READY and then ended by themselves. An entry stays until the model is unloaded or its name is
    /// loaded again.
    pub(super) fallen: BTreeMap<String, Known>,
    next_generation: u64,
    pub(super) born: Instant,
    /// Callers waiting for the runtime to end. While there is one, nothing more is loaded.
    pub(super) shutting_down: Vec<Responder<usize>>,
    /// Requests cut off when their models ended, counted from the first shutdown call.
    cut_off: usize,
}

pub(super) struct Engine {
    /// A number that identifies this model across all its engines.
    pub(super) load: u64,
    pub(super) cell: ActorCell,
    pub(super) arguments: EngineArguments,
    restarts: RestartLog,
    /// Credits of the model's running requests.
    pub(super) requests: Credits,
    /// Callers waiting for the model to end. While there is one, it takes no requests.
    leaving: Vec<Home>,
    /// Set while the model is being ended: the number of requests that were running then.
    pub(super) ending: Option<usize>,
    /// The model was unloaded, or its loader no longer wants it.
    is_let_go: bool,
    /// How gauges show the model; set when it is first READY.
    pub(super) known: Option<Known>,
}

/// Closes the mailbox on drop, so that callers waiting for a budget hear that none will come, however the runtime ends.
pub(super) struct ClosingMailbox(pub(super) Arc<BudgetMailbox>);

impl Drop for ClosingMailbox {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Actor for RuntimeActor {
    type Msg = RuntimeMessage;
    type State = RuntimeState;
    type Arguments = RuntimeArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<RuntimeMessage>,
        arguments: RuntimeArguments,
    ) -> Result<RuntimeState, ActorProcessingErr> {
        let RuntimeArguments { shown, again, device_intensity, ledger, canary, mailbox, budget_intensity, watch } =
            arguments;
        let device = shown.device.borrow().clone();
        let budget = spawn_budget(&myself, &device, &ledger, canary, watch, &mailbox).await?;
        myself.send_message(RuntimeMessage::Show)?;
        Ok(RuntimeState {
            shown,
            again,
            device_losses: RestartLog::new(Policy::OneForOne, device_intensity, 1),
            is_lost: false,
            ledger,
            canary,
            mailbox: ClosingMailbox(mailbox),
            watch,
            budget,
            budget_restarts: RestartLog::new(Policy::OneForOne, budget_intensity, 1),
            engines: BTreeMap::new(),
            fallen: BTreeMap::new(),
            next_generation: 0,
            born: Instant::now(),
            shutting_down: Vec::new(),
            cut_off: 0,
        })
    }

    /// Never waits for the budget, because this actor is the one that restarts it.
    async fn handle(
        &self,
        myself: ActorRef<RuntimeMessage>,
        message: RuntimeMessage,
        state: &mut RuntimeState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RuntimeMessage::Load { reply, .. } if !state.shutting_down.is_empty() => {
                reply.answer(Err(Arc::new(StartError::ShuttingDown)));
            }
            // No device to load on yet. Try again until there is one, or until this actor has ended.
            load @ RuntimeMessage::Load { .. } if state.is_lost => drop(myself.send_after(LOSS_POLL, || load)),
            RuntimeMessage::Load { name, source, options, progress, reply } => {
                let name = state.free_name(name);
                state.fallen.remove(&name).iter().for_each(|fallen| fallen.show(false));
                let (status, watched) = watch::channel(Status::Starting);
                let (label, losses) = (Label::from(name.clone()), state.shown.losses.subscribe());
                metric::expect_model(&label);
                let handle = ModelHandle::new(label.clone(), watched, options.requests, losses);
                let device = state.shown.device.borrow().clone();
                let arguments = EngineArguments {
                    label,
                    source,
                    options: *options,
                    budget: Budget::at(state.mailbox.0.clone()),
                    device,
                    weight_store: WeightStore::default(),
                    generation: state.next_generation,
                    status: Arc::new(status),
                    progress,
                };
                let load = state.next_generation;
                state.spawn_engine(&myself, name.clone(), load, handle.credits().clone(), arguments).await?;
                tokio::spawn(await_start(myself.clone(), name, load, handle, reply));
            }
            RuntimeMessage::Unload { name, within, reply } => {
                state.fallen.remove(&name).iter().for_each(|fallen| fallen.show(false));
                let home = Box::new(move |cut_off| reply.answer(cut_off));
                state.end_within(&myself, &name, within, UNLOADED, home);
            }
            RuntimeMessage::Supervised(reply) => {
                let engines = state.engines.iter().map(|(name, engine)| (name.clone(), engine.cell.clone()));
                reply.answer(Supervised { budget: state.budget.clone(), engines: engines.collect() });
            }
            RuntimeMessage::Health(reply) => reply.answer(state.health()),
            RuntimeMessage::Forget { name, load, home } => {
                if state.has(&name, load) {
                    state.engines.get_mut(&name).into_iter().for_each(|engine| engine.is_let_go = true);
                    state.end(&myself, &name, "it did not start", home);
                } else {
                    home(0);
                }
            }
            RuntimeMessage::Respawn { name, load } => {
                let is_due = |engine: &&Engine| engine.load == load && engine.ending.is_none() && !state.is_lost;
                let waiting = state.engines.get(&name).filter(is_due);
                if let Some(engine) = waiting {
                    let (requests, arguments) = (engine.requests.clone(), engine.arguments.clone());
                    state.spawn_engine(&myself, name, load, requests, arguments).await?;
                }
            }
            RuntimeMessage::Ended { name, load } => {
                if state.has(&name, load) {
                    let engine = state.engines.remove(&name).expect("seen above");
                    let cut_off = engine.ending.unwrap_or_default();
                    metric::forget_model(&engine.arguments.label);
                    match engine.known {
                        Some(known) if engine.is_let_go => known.show(false),
                        Some(known) => drop(state.fallen.insert(name, known)),
                        None => {}
                    }
                    engine.leaving.into_iter().for_each(|home| home(cut_off));
                }
            }
            RuntimeMessage::Due { name, load } => {
                if state.has(&name, load) {
                    let reason = if state.shutting_down.is_empty() { UNLOADED } else { SHUT_DOWN };
                    state.end(&myself, &name, reason, nobody());
                }
            }
            RuntimeMessage::DeviceLost => {
                // A loss reported for a predecessor of this device is old news.
                if let Some(error) = state.loss() {
                    state.device_lost(&myself, error);
                }
            }
            RuntimeMessage::DeviceMade(made) => state.device_made(&myself, made).await?,
            RuntimeMessage::RespawnBudget => {
                let RuntimeState { shown, ledger, canary, mailbox, watch, .. } = &*state;
                let device = shown.device.borrow().clone();
                match spawn_budget(&myself, &device, ledger, *canary, *watch, &mailbox.0).await {
                    Ok(budget) => state.budget = budget,
                    // A budget that dies while it starts counts as a death.
                    Err(error) => state.budget_died(&myself, &error.to_string())?,
                }
            }
            RuntimeMessage::ShutDown { within, reply } => {
                state.shutting_down.push(reply);
                for name in state.engines.keys().cloned().collect::<Vec<_>>() {
                    state.end_within(&myself, &name, within, SHUT_DOWN, nobody());
                }
            }
            RuntimeMessage::Show => drop(myself.send_after(metric::SHOWN_EVERY, || RuntimeMessage::Show)),
            RuntimeMessage::InjectFault(fault) => return Err(fault.strike().into()),
        }
        state.show();
        if !state.shutting_down.is_empty() && state.engines.is_empty() {
            myself.stop(None);
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RuntimeMessage>,
        event: SupervisionEvent,
        state: &mut RuntimeState,
    ) -> Result<(), ActorProcessingErr> {
        let Some((cell, reason)) = end_of(event) else { return Ok(()) };
        if cell.get_id() == state.budget.get_id() {
            return state.budget_died(&myself, &reason);
        }
        let found = state.engines.iter().find(|(_, engine)| engine.cell.get_id() == cell.get_id());
        let Some(name) = found.map(|(name, _)| name.clone()) else { return Ok(()) };
        // An engine that ends by itself has already given a reason: its start failed, or it gave up. Anything else is a
        // death, including a stop from outside.
        if state.engines[&name].arguments.status.borrow().is_over() {
            state.end(&myself, &name, &reason, nobody());
        } else if let Some(error) = state.loss() {
            state.device_lost(&myself, error);
        } else {
            state.engine_died(&myself, &name, &reason);
        }
        state.show();
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<RuntimeMessage>, state: &mut RuntimeState) -> Result<(), ActorProcessingErr> {
        // Only a courtesy: without it, callers would hear that the runtime is gone.
        if !state.shutting_down.is_empty() {
            drop(state.budget.kill_and_wait(None).await);
        }
        state.mailbox.0.close();
        let cut_off = state.cut_off;
        state.shutting_down.drain(..).for_each(|reply| reply.answer(cut_off));
        Ok(())
    }
}

/// How often a pending load checks whether there is a device again.
const LOSS_POLL: Duration = Duration::from_millis(20);

const SHUT_DOWN: &str = "the runtime was shut down";
const UNLOADED: &str = "it was unloaded";

fn nobody() -> Home {
    Box::new(|_| {})
}

/// Waits for a model's start and answers the load. If the caller has gone, the model is ended. A failed start is
/// answered once all its memory is back.
async fn await_start(
    runtime: ActorRef<RuntimeMessage>,
    name: String,
    load: u64,
    handle: ModelHandle,
    mut reply: Responder<Result<ModelHandle, Arc<StartError>>>,
) {
    let forget = |home| drop(runtime.send_message(RuntimeMessage::Forget { name, load, home }));
    let started = tokio::select! {
        started = handle.serving() => started,
        () = reply.given_up() => return forget(nobody()),
    };
    let error = match started {
        Ok(_) => return reply.answer(Ok(handle)),
        Err(ChatError::NotStarted(error)) => error,
        Err(ChatError::Stopped { reason }) => Arc::new(StartError::Stopped { reason }),
        Err(error) => Arc::new(StartError::Stopped { reason: error.to_string().into() }),
    };
    let (home, is_home) = oneshot::channel();
    forget(Box::new(move |_| {
        let _ = home.send(());
    }));
    // If the runtime ends with this message unread, everything it supervised is gone too. The caller still hears the
    // reason.
    let _ = is_home.await;
    reply.answer(Err(error));
}

impl RuntimeState {
    fn free_name(&self, name: String) -> String {
        // A model named like the label of tenants' leases would share a gate with them.
        let is_free = |name: &String| !self.engines.contains_key(name) && name != NO_MODEL;
        let numbered = (2u64..).map(|number| format!("{name} {number}"));
        std::iter::once(name.clone()).chain(numbered).find(is_free).expect("numbers do not end")
    }

    pub(super) async fn spawn_engine(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        load: u64,
        requests: Credits,
        arguments: EngineArguments,
    ) -> Result<(), ActorProcessingErr> {
        let generation = self.next_generation;
        self.next_generation += 1;
        let arguments = EngineArguments { generation, ..arguments };
        let (engine, _) = EngineActor::spawn_linked(None, EngineActor, arguments.clone(), myself.get_cell()).await?;
        let cell = engine.get_cell();
        let engine = match self.engines.remove(&name) {
            Some(earlier) => Engine { load, cell, arguments, requests, ending: None, ..earlier },
            None => {
                let restarts = RestartLog::new(Policy::OneForOne, arguments.options.engine_intensity, 1);
                let (leaving, is_let_go) = (Vec::new(), false);
                Engine { load, cell, arguments, restarts, requests, leaving, ending: None, is_let_go, known: None }
            }
        };
        self.engines.insert(name, engine);
        Ok(())
    }

    fn health(&self) -> Health {
        let health = |engine: &Engine| match &*engine.arguments.status.borrow() {
            _ if engine.is_let_go => ModelHealth::Leaving,
            Status::Starting => ModelHealth::Starting,
            Status::Ready(_) => ModelHealth::Ready,
            Status::Failed(_) | Status::Stopped { .. } => ModelHealth::Stopped,
        };
        let fallen = self.fallen.keys().map(|name| (name.clone(), ModelHealth::Stopped));
        let engines = self.engines.iter().map(|(name, engine)| (name.clone(), health(engine)));
        Health { is_live: true, models: fallen.chain(engines).collect() }
    }

    /// The dead engine's actors died with it. Once its bytes are back, it starts again with the same weights.
    fn engine_died(&mut self, myself: &ActorRef<RuntimeMessage>, name: &str, reason: &str) {
        let now = self.born.elapsed();
        let engine = self.engines.get_mut(name).expect("found by the caller");
        if engine.ending.is_some() {
            return;
        }
        let (load, arguments) = (engine.load, engine.arguments.clone());
        match engine.restarts.died(0, now) {
            Decision::Restart { after, .. } => {
                arguments.show(Status::Starting);
                arguments.tell_of_restart(Role::Engine, reason);
                let (myself, name) = (myself.clone(), name.to_owned());
                tokio::spawn(async move {
                    bring_home(&arguments).await;
                    myself.send_after(after, move || RuntimeMessage::Respawn { name, load });
                });
            }
            Decision::GiveUp { restarts, .. } => {
                let reason = format!("its engine was restarted {restarts} times, the last after: {reason}");
                self.end(myself, name, &reason, nobody());
            }
        }
    }

    /// Stops a model from taking requests. Ends it when its running requests have ended, or at the deadline.
    fn end_within(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: &str,
        within: Duration,
        reason: &str,
        home: Home,
    ) {
        let Some(engine) = self.engines.get_mut(name) else { return home(0) };
        engine.requests.close();
        engine.is_let_go = true;
        if within.is_zero() || engine.requests.taken() == 0 {
            return self.end(myself, name, reason, home);
        }
        engine.leaving.push(home);
        let (myself, name, load, requests) = (myself.clone(), name.to_owned(), engine.load, engine.requests.clone());
        tokio::spawn(async move {
            // Running into the deadline is no error: the remaining requests are cut off.
            let _ = tokio::time::timeout(within, requests.idle()).await;
            drop(myself.send_message(RuntimeMessage::Due { name, load }));
        });
    }

    fn has(&self, name: &str, load: u64) -> bool {
        self.engines.get(name).is_some_and(|engine| engine.load == load)
    }

    /// Stops an engine and everything under it, returns all its memory including weights, then calls `home`. The name
    /// stays taken until then.
    fn end(&mut self, myself: &ActorRef<RuntimeMessage>, name: &str, reason: &str, home: Home) {
        let Some(engine) = self.engines.get_mut(name) else { return home(0) };
        engine.leaving.push(home);
        if engine.ending.is_some() {
            return;
        }
        // The model may have ended before its status was last read.
        engine.get_to_know();
        let cut_off = engine.requests.taken();
        engine.ending = Some(cut_off);
        if !self.shutting_down.is_empty() {
            self.cut_off += cut_off;
        }
        let (myself, name, reason) = (myself.clone(), name.to_owned(), Arc::<str>::from(reason));
        let (load, cell, arguments) = (engine.load, engine.cell.clone(), engine.arguments.clone());
        tokio::spawn(async move {
            let budget = &arguments.budget;
            // From now on late claims are refused. The next model of this name opens the gate again. If the name never
            // had a gate, this changes nothing.
            drop(budget.move_gate(arguments.label.clone(), Gate::Teardown).await);
            // Its children die with it.
            drop(cell.kill_and_wait(None).await);
            // An engine that gave a reason keeps it.
            arguments.show(Status::Stopped { reason });
            bring_all_home(&arguments).await;
            drop(myself.send_message(RuntimeMessage::Ended { name, load }));
        });
    }

    fn budget_died(&mut self, myself: &ActorRef<RuntimeMessage>, reason: &str) -> Result<(), ActorProcessingErr> {
        match self.budget_restarts.died(0, self.born.elapsed()) {
            Decision::Restart { after, .. } => {
                metric::RESTARTS_TOTAL.add(&(no_model(), Role::Budget), 1);
                metric::ACTOR_UP.set(&(no_model(), Role::Budget), false);
                let (actor, reason) = (Role::Budget.name(), reason.to_owned());
                self.mailbox.0.events().tell(Event::Restart { model: None, actor, reason });
                myself.send_after(after, || RuntimeMessage::RespawnBudget);
                Ok(())
            }
            Decision::GiveUp { restarts, .. } => {
                let reason = format!("the budget was restarted {restarts} times, the last after: {reason}");
                for engine in self.engines.values() {
                    engine.arguments.show(Status::Stopped { reason: reason.as_str().into() });
                }
                Err(reason.into())
            }
        }
    }
}

/// Returns all memory that an engine's attempts may hold. The threads end first: a thread that still used memory after
/// it was unmapped would crash the process.
async fn bring_home(arguments: &EngineArguments) {
    let owner = arguments.last_owner();
    arguments.weight_store.shut_down(owner.generation).await;
    for owner in [owner, arguments.vision_owner()] {
        // Only a runtime that is gone has no budget actor, and then there is no ledger either.
        let _ = arguments.budget.clear(owner).await;
    }
}

/// As `bring_home`, then returns the weights too.
pub(super) async fn bring_all_home(arguments: &EngineArguments) {
    bring_home(arguments).await;
    let (weights, model) = arguments.weight_store.clear();
    if let Some(weights) = weights {
        let _ = arguments.budget.clear(weights).await;
    }
    drop(model);
    arguments.weight_store.clear_processor().await;
}

pub(super) async fn spawn_budget(
    myself: &ActorRef<RuntimeMessage>,
    device: &Arc<dyn Device>,
    ledger: &LedgerConfig,
    canary: Bytes,
    watch: WatchOptions,
    mailbox: &Arc<BudgetMailbox>,
) -> Result<ActorCell, ActorProcessingErr> {
    let (device, mailbox, runtime) = (device.clone(), mailbox.clone(), myself.clone());
    let on_loss: OnLoss = Box::new(move || drop(runtime.send_message(RuntimeMessage::DeviceLost)));
    let arguments = BudgetArguments { device, mailbox, config: ledger.clone(), canary, on_loss: Some(on_loss), watch };
    let (budget, _) = BudgetActor::spawn_linked(None, BudgetActor, arguments, myself.get_cell()).await?;
    Ok(budget.get_cell())
}
