//! The runtime supervisor.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use bursar_budgets::{Bytes, Device, Gate, Label, LedgerConfig};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;

use super::{RuntimeMessage, Supervised};
use crate::{
    budget::{Budget, BudgetActor, BudgetArguments, Desk, NO_MODEL},
    chat::{ChatError, ModelHandle},
    engine::{EngineActor, EngineArguments, Shelf, StartError, Status},
    reply::Reply,
    supervise::{Decision, Intensity, Policy, RestartLog},
};

/// Supervises one device's budget and its engines.
pub struct RuntimeActor;

/// What it starts with.
pub struct RuntimeArguments {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Its ledger's totals.
    pub ledger: LedgerConfig,
    /// Bytes kept free of use.
    pub canary: Bytes,
    /// Where leases post their notes.
    pub desk: Arc<Desk>,
}

/// Its state.
pub struct RuntimeState {
    device: Arc<dyn Device>,
    ledger: LedgerConfig,
    canary: Bytes,
    desk: ClosingDesk,
    budget: ActorCell,
    budget_restarts: RestartLog,
    engines: BTreeMap<String, Engine>,
    next_generation: u64,
    born: Instant,
    /// Who waits for the end of everything.
    shutting_down: Vec<Reply<()>>,
}

struct Engine {
    /// Names this model for its whole life, over all its engines.
    load: u64,
    cell: ActorCell,
    arguments: EngineArguments,
    restarts: RestartLog,
    /// An end is being put to it; who waits for that.
    ending: Option<Vec<Box<dyn FnOnce() + Send>>>,
}

/// Whoever waits for a budget that will never come hears so, however the runtime ends.
struct ClosingDesk(Arc<Desk>);

impl Drop for ClosingDesk {
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
        let RuntimeArguments { device, ledger, canary, desk } = arguments;
        let budget = spawn_budget(&myself, &device, &ledger, canary, &desk).await?;
        Ok(RuntimeState {
            device,
            ledger,
            canary,
            desk: ClosingDesk(desk),
            budget,
            budget_restarts: RestartLog::new(Policy::OneForOne, Intensity::default(), 1),
            engines: BTreeMap::new(),
            next_generation: 0,
            born: Instant::now(),
            shutting_down: Vec::new(),
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
                reply.answer(Err(Arc::new(StartError::Stopped { reason: SHUT_DOWN.into() })));
            }
            RuntimeMessage::Load { name, source, options, progress, reply } => {
                let name = state.free_name(name);
                let (status, watched) = watch::channel(Status::Starting);
                let handle = ModelHandle::new(watched, options.requests);
                let arguments = EngineArguments {
                    label: Label::from(name.clone()),
                    source,
                    options: *options,
                    budget: Budget::at(state.desk.0.clone()),
                    device: state.device.clone(),
                    shelf: Shelf::default(),
                    generation: state.next_generation,
                    status: Arc::new(status),
                    progress,
                };
                let load = state.next_generation;
                state.spawn_engine(&myself, name.clone(), load, arguments).await?;
                tokio::spawn(await_start(myself.clone(), name, load, handle, reply));
            }
            RuntimeMessage::Unload { name, reply } => {
                state.end(&myself, &name, "it was unloaded", Box::new(move || reply.answer(())));
            }
            RuntimeMessage::Supervised(reply) => {
                let engines = state.engines.iter().map(|(name, engine)| (name.clone(), engine.cell.clone()));
                reply.answer(Supervised { budget: state.budget.clone(), engines: engines.collect() });
            }
            RuntimeMessage::Forget { name, load, home } => {
                if state.engines.get(&name).is_some_and(|engine| engine.load == load) {
                    state.end(&myself, &name, "it did not start", home);
                } else {
                    home();
                }
            }
            RuntimeMessage::Respawn { name, load } => {
                let waiting = state.engines.get(&name).filter(|engine| engine.load == load && engine.ending.is_none());
                if let Some(engine) = waiting {
                    let arguments = engine.arguments.clone();
                    state.spawn_engine(&myself, name, load, arguments).await?;
                }
            }
            RuntimeMessage::Ended { name, load } => {
                if state.engines.get(&name).is_some_and(|engine| engine.load == load) {
                    let engine = state.engines.remove(&name).expect("seen above");
                    engine.ending.into_iter().flatten().for_each(|home| home());
                }
            }
            RuntimeMessage::RespawnBudget => {
                let RuntimeState { device, ledger, canary, desk, .. } = &*state;
                state.budget = spawn_budget(&myself, device, ledger, *canary, &desk.0).await?;
            }
            RuntimeMessage::ShutDown(reply) => {
                state.shutting_down.push(reply);
                for name in state.engines.keys().cloned().collect::<Vec<_>>() {
                    state.end(&myself, &name, SHUT_DOWN, Box::new(|| {}));
                }
            }
        }
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
        let (cell, reason, failed) = match event {
            SupervisionEvent::ActorFailed(cell, error) => (cell, error.to_string(), true),
            SupervisionEvent::ActorTerminated(cell, _, reason) => (cell, reason.unwrap_or_default(), false),
            _ => return Ok(()),
        };
        if cell.get_id() == state.budget.get_id() {
            return state.budget_died(&myself, &reason);
        }
        let found = state.engines.iter().find(|(_, engine)| engine.cell.get_id() == cell.get_id());
        let Some(name) = found.map(|(name, _)| name.clone()) else { return Ok(()) };
        if failed || reason == KILLED {
            state.engine_died(&myself, &name, &reason);
        } else {
            // One that stops by itself has said why: its start failed, or it gave up.
            state.end(&myself, &name, &reason, Box::new(|| {}));
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<RuntimeMessage>, state: &mut RuntimeState) -> Result<(), ActorProcessingErr> {
        // Nothing relies on this: without it the askers hear that nobody is there.
        if !state.shutting_down.is_empty() {
            drop(state.budget.kill_and_wait(None).await);
        }
        state.desk.0.close();
        state.shutting_down.drain(..).for_each(|reply| reply.answer(()));
        Ok(())
    }
}

/// What ractor says of an actor that was killed.
const KILLED: &str = "killed";
const SHUT_DOWN: &str = "the runtime was shut down";

/// Answers the question for a model. One that nobody waits for any more is ended, and a start that failed is answered
/// when all of it is home.
async fn await_start(
    runtime: ActorRef<RuntimeMessage>,
    name: String,
    load: u64,
    handle: ModelHandle,
    mut reply: Reply<Result<ModelHandle, Arc<StartError>>>,
) {
    let forget = |home| drop(runtime.send_message(RuntimeMessage::Forget { name, load, home }));
    let started = tokio::select! {
        started = handle.serving() => started,
        () = reply.given_up() => return forget(Box::new(|| {})),
    };
    let error = match started {
        Ok(_) => return reply.answer(Ok(handle)),
        Err(ChatError::NotStarted(error)) => error,
        Err(ChatError::Stopped { reason }) => Arc::new(StartError::Stopped { reason }),
        Err(error) => Arc::new(StartError::Stopped { reason: error.to_string().into() }),
    };
    forget(Box::new(move || reply.answer(Err(error))));
}

impl RuntimeState {
    fn free_name(&self, name: String) -> String {
        // A model named as the tenants' leases are would share a gate with them.
        let is_free = |name: &String| !self.engines.contains_key(name) && name != NO_MODEL;
        let numbered = (2u64..).map(|number| format!("{name} {number}"));
        std::iter::once(name.clone()).chain(numbered).find(is_free).expect("numbers do not end")
    }

    async fn spawn_engine(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        load: u64,
        arguments: EngineArguments,
    ) -> Result<(), ActorProcessingErr> {
        let generation = self.next_generation;
        self.next_generation += 1;
        let arguments = EngineArguments { generation, ..arguments };
        let (engine, _) = EngineActor::spawn_linked(None, EngineActor, arguments.clone(), myself.get_cell()).await?;
        let restarts = match self.engines.remove(&name) {
            Some(earlier) => earlier.restarts,
            None => RestartLog::new(Policy::OneForOne, arguments.options.intensity, 1),
        };
        self.engines.insert(name, Engine { load, cell: engine.get_cell(), arguments, restarts, ending: None });
        Ok(())
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
                arguments.status.send_replace(Status::Starting);
                let (myself, name) = (myself.clone(), name.to_owned());
                tokio::spawn(async move {
                    bring_home(&arguments).await;
                    myself.send_after(after, move || RuntimeMessage::Respawn { name, load });
                });
            }
            Decision::GiveUp { restarts, .. } => {
                let reason = format!("its engine was restarted {restarts} times, the last after: {reason}");
                self.end(myself, name, &reason, Box::new(|| {}));
            }
        }
    }

    /// Stops an engine and what it supervises, and brings every byte home, weights included; then calls `home`. The
    /// name stays taken until then.
    fn end(&mut self, myself: &ActorRef<RuntimeMessage>, name: &str, reason: &str, home: Box<dyn FnOnce() + Send>) {
        let Some(engine) = self.engines.get_mut(name) else { return home() };
        if let Some(waiting) = &mut engine.ending {
            return waiting.push(home);
        }
        engine.ending = Some(vec![home]);
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
            arguments.status.send_if_modified(|status| {
                let is_over = matches!(status, Status::Failed(_) | Status::Stopped { .. });
                if !is_over {
                    *status = Status::Stopped { reason };
                }
                !is_over
            });
            bring_home(&arguments).await;
            if let Some(weights) = arguments.shelf.clear() {
                let _ = budget.clear(weights).await;
            }
            drop(myself.send_message(RuntimeMessage::Ended { name, load }));
        });
    }

    fn budget_died(&mut self, myself: &ActorRef<RuntimeMessage>, reason: &str) -> Result<(), ActorProcessingErr> {
        match self.budget_restarts.died(0, self.born.elapsed()) {
            Decision::Restart { after, .. } => {
                myself.send_after(after, || RuntimeMessage::RespawnBudget);
                Ok(())
            }
            Decision::GiveUp { restarts, .. } => {
                let reason = format!("the budget was restarted {restarts} times, the last after: {reason}");
                for engine in self.engines.values() {
                    engine.arguments.status.send_replace(Status::Stopped { reason: reason.as_str().into() });
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
    arguments.shelf.quench(owner.generation).await;
    for owner in [owner, arguments.vision_owner()] {
        // Only a runtime that is gone has no budget, and then there is no ledger to bring anything home to.
        let _ = arguments.budget.clear(owner).await;
    }
}

async fn spawn_budget(
    myself: &ActorRef<RuntimeMessage>,
    device: &Arc<dyn Device>,
    ledger: &LedgerConfig,
    canary: Bytes,
    desk: &Arc<Desk>,
) -> Result<ActorCell, ActorProcessingErr> {
    let arguments = BudgetArguments { device: device.clone(), desk: desk.clone(), config: ledger.clone(), canary };
    let (budget, _) = BudgetActor::spawn_linked(None, BudgetActor, arguments, myself.get_cell()).await?;
    Ok(budget.get_cell())
}
