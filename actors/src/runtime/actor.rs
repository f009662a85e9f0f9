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

/// Supervises one device's budget and its engines.
pub struct RuntimeActor;

/// What it starts with.
pub struct RuntimeArguments {
    /// The device, and where its successors are shown.
    pub shown: Shown,
    /// What makes a successor; without it the runtime ends with its device.
    pub again: Option<MakeDevice>,
    /// When losses of the device become too many.
    pub device_intensity: Intensity,
    /// Its ledger's totals.
    pub ledger: LedgerConfig,
    /// Bytes kept free of use.
    pub canary: Bytes,
    /// Where leases post their notes.
    pub mailbox: Arc<BudgetMailbox>,
    /// When restarts of the budget become a crash loop.
    pub budget_intensity: Intensity,
    /// How the budget watches the device.
    pub watch: WatchOptions,
}

/// Its state.
pub struct RuntimeState {
    pub(super) shown: Shown,
    pub(super) again: Option<MakeDevice>,
    pub(super) device_losses: RestartLog,
    /// The device is lost, and what was on it is being ended.
    pub(super) is_lost: bool,
    pub(super) ledger: LedgerConfig,
    pub(super) canary: Bytes,
    pub(super) mailbox: ClosingMailbox,
    pub(super) watch: WatchOptions,
    pub(super) budget: ActorCell,
    budget_restarts: RestartLog,
    pub(super) engines: BTreeMap<String, Engine>,
    /// Models that were ready and have ended by themselves, until somebody unloads them or loads others of their names.
    pub(super) fallen: BTreeMap<String, Known>,
    next_generation: u64,
    pub(super) born: Instant,
    /// Who waits for the end of everything. Nothing is loaded any more from the first on.
    pub(super) shutting_down: Vec<Responder<usize>>,
    /// Requests that were under way when their model ended, since the first of those asked.
    cut_off: usize,
}

pub(super) struct Engine {
    /// Names this model for its whole life, over all its engines.
    pub(super) load: u64,
    pub(super) cell: ActorCell,
    pub(super) arguments: EngineArguments,
    restarts: RestartLog,
    /// Its requests under way.
    pub(super) requests: Credits,
    /// Who waits for its end, from the time on when it takes no more requests.
    leaving: Vec<Home>,
    /// An end is being put to it. So many requests were under way.
    pub(super) ending: Option<usize>,
    /// Somebody has unloaded it, or does not want it any more.
    is_let_go: bool,
    /// Since it was ready for the first time.
    pub(super) known: Option<Known>,
}

/// Whoever waits for a budget that will never come hears so, however the runtime ends.
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

    /// Never waits for the budget: this is who starts it again.
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
            // There is nothing to load it on, and soon there is, or nobody to load it.
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
                // What is said of a predecessor of this device is no news.
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
                    // One that dies while it starts has died all the same.
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
        // One that ends by itself has said why before: its start failed, or it gave up. All else is a death, also a stop
        // by somebody who had hold of it.
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
        // Nothing relies on this: without it the askers hear that nobody is there.
        if !state.shutting_down.is_empty() {
            drop(state.budget.kill_and_wait(None).await);
        }
        state.mailbox.0.close();
        let cut_off = state.cut_off;
        state.shutting_down.drain(..).for_each(|reply| reply.answer(cut_off));
        Ok(())
    }
}

/// How often a load looks whether there is a device again.
const LOSS_POLL: Duration = Duration::from_millis(20);

const SHUT_DOWN: &str = "the runtime was shut down";
const UNLOADED: &str = "it was unloaded";

fn nobody() -> Home {
    Box::new(|_| {})
}

/// Answers the question for a model. One that nobody waits for any more is ended, and a start that failed is answered
/// when all of it is home.
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
    // With the runtime, also one that ends with this message unread, all that it supervised is gone; but whoever asks
    // hears the reason.
    let _ = is_home.await;
    reply.answer(Err(error));
}

impl RuntimeState {
    fn free_name(&self, name: String) -> String {
        // A model named as the tenants' leases are would share a gate with them.
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

    /// The dead engine's actors died with it. Its bytes come home; then it starts again with the weights it had.
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

    /// Lets a model take no more requests, and ends it when those under way have ended or at the deadline.
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
            // Also who comes to be cut off is no error.
            let _ = tokio::time::timeout(within, requests.idle()).await;
            drop(myself.send_message(RuntimeMessage::Due { name, load }));
        });
    }

    fn has(&self, name: &str, load: u64) -> bool {
        self.engines.get(name).is_some_and(|engine| engine.load == load)
    }

    /// Stops an engine and what it supervises, and brings every byte home, weights included; then calls `home`. The
    /// name stays taken until then.
    fn end(&mut self, myself: &ActorRef<RuntimeMessage>, name: &str, reason: &str, home: Home) {
        let Some(engine) = self.engines.get_mut(name) else { return home(0) };
        engine.leaving.push(home);
        if engine.ending.is_some() {
            return;
        }
        // It may have ended sooner than anybody looked.
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
            // Late claims are refused; the next model of this name opens it again. The gate of a name that never had
            // one stays where it is, and is in nobody's way.
            drop(budget.move_gate(arguments.label.clone(), Gate::Teardown).await);
            // Its children die with it.
            drop(cell.kill_and_wait(None).await);
            // An engine that has said why it ended knows better.
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

/// Brings home what the attempts of an engine may have held. Its threads end first: a late use of memory that was taken
/// back would end the process.
async fn bring_home(arguments: &EngineArguments) {
    let owner = arguments.last_owner();
    arguments.weight_store.shut_down(owner.generation).await;
    for owner in [owner, arguments.vision_owner()] {
        // Only a runtime that is gone has no budget, and then there is no ledger to bring anything home to.
        let _ = arguments.budget.clear(owner).await;
    }
}

/// The same, and the weights.
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
