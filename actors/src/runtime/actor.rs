//! The runtime supervisor.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use bursar_budgets::{Bytes, Device, Label, LedgerConfig, Owner};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;

use super::RuntimeMessage;
use crate::{
    budget::{Budget, BudgetActor, BudgetArguments, Desk},
    chat::ModelHandle,
    engine::{EngineActor, EngineArguments, Shelf, Status},
    profile::ATTEMPTS_MAX,
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
    desk: Arc<Desk>,
    budget: ActorCell,
    budget_restarts: RestartLog,
    engines: BTreeMap<String, Engine>,
    next_generation: u64,
    born: Instant,
}

struct Engine {
    cell: ActorCell,
    arguments: EngineArguments,
    restarts: RestartLog,
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
            desk,
            budget,
            budget_restarts: RestartLog::new(Policy::OneForOne, Intensity::default(), 1),
            engines: BTreeMap::new(),
            next_generation: 0,
            born: Instant::now(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<RuntimeMessage>,
        message: RuntimeMessage,
        state: &mut RuntimeState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RuntimeMessage::Load { name, source, options, progress, reply } => {
                let name = state.free_name(name);
                let (status, watched) = watch::channel(Status::Starting);
                let handle = ModelHandle::new(watched, options.requests);
                let arguments = EngineArguments {
                    label: Label::from(name.clone()),
                    source,
                    options: *options,
                    budget: Budget::at(state.desk.clone()),
                    device: state.device.clone(),
                    shelf: Shelf::default(),
                    generation: state.next_generation,
                    status: Arc::new(status),
                    progress,
                };
                let generation = state.spawn_engine(&myself, name.clone(), arguments).await?;
                tokio::spawn(async move {
                    match handle.serving().await {
                        Ok(_) => reply.answer(Ok(handle)),
                        Err(error) => {
                            drop(myself.send_message(RuntimeMessage::Forget { name, generation }));
                            if let crate::chat::ChatError::NotStarted(error) = error {
                                reply.answer(Err(error));
                            }
                        }
                    }
                });
            }
            RuntimeMessage::Unload { name, reply } => {
                if let Some(engine) = state.engines.remove(&name) {
                    state.end(engine, "unloaded").await?;
                }
                reply.answer(());
            }
            RuntimeMessage::Forget { name, generation } => {
                if state.engines.get(&name).is_some_and(|engine| engine.arguments.generation == generation) {
                    let engine = state.engines.remove(&name).expect("seen above");
                    state.end(engine, "it did not start").await?;
                }
            }
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
            return state.budget_died(&myself, &reason).await;
        }
        let found = state.engines.iter().find(|(_, engine)| engine.cell.get_id() == cell.get_id());
        let Some(name) = found.map(|(name, _)| name.clone()) else { return Ok(()) };
        // An engine that stops by itself has said why: its start failed, or it gave up.
        if failed || reason == KILLED {
            state.engine_died(&myself, name, &reason).await?;
        }
        Ok(())
    }
}

/// What ractor says of an actor that was killed.
const KILLED: &str = "killed";

impl RuntimeState {
    fn free_name(&self, name: String) -> String {
        if !self.engines.contains_key(&name) {
            return name;
        }
        let numbered = (2u64..).map(|number| format!("{name} {number}"));
        numbered.into_iter().find(|name| !self.engines.contains_key(name)).expect("numbers do not end")
    }

    async fn spawn_engine(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        arguments: EngineArguments,
    ) -> Result<u64, ActorProcessingErr> {
        let generation = self.next_generation;
        self.next_generation += 1;
        let arguments = EngineArguments { generation, ..arguments };
        let (engine, _) =
            EngineActor::spawn_linked(None, EngineActor, arguments.clone(), myself.get_cell()).await?;
        let restarts = match self.engines.remove(&name) {
            Some(earlier) => earlier.restarts,
            None => RestartLog::new(Policy::OneForOne, arguments.options.intensity, 1),
        };
        self.engines.insert(name, Engine { cell: engine.get_cell(), arguments, restarts });
        Ok(generation)
    }

    /// The dead engine's actors are stopped and its bytes come home; then it starts again with the weights it had.
    async fn engine_died(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        reason: &str,
    ) -> Result<(), ActorProcessingErr> {
        let now = self.born.elapsed();
        let engine = self.engines.get_mut(&name).expect("found by the caller");
        let arguments = engine.arguments.clone();
        arguments.status.send_replace(Status::Starting);
        match engine.restarts.died(0, now) {
            Decision::Restart { after, .. } => {
                clear_engine(&arguments, &self.desk).await?;
                tokio::time::sleep(after).await;
                self.spawn_engine(myself, name, arguments).await?;
            }
            Decision::GiveUp { restarts, .. } => {
                let reason = format!("its engine was restarted {restarts} times, the last after: {reason}");
                arguments.status.send_replace(Status::Stopped { reason: reason.as_str().into() });
                let engine = self.engines.remove(&name).expect("found by the caller");
                self.end(engine, &reason).await?;
            }
        }
        Ok(())
    }

    /// Stops an engine and what it supervises, and brings every byte home, weights included.
    async fn end(&mut self, engine: Engine, reason: &str) -> Result<(), ActorProcessingErr> {
        let Engine { cell, arguments, .. } = engine;
        // Its children die with it.
        drop(cell.kill_and_wait(None).await);
        if !matches!(*arguments.status.borrow(), Status::Failed(_)) {
            arguments.status.send_replace(Status::Stopped { reason: reason.into() });
        }
        clear_engine(&arguments, &self.desk).await?;
        if let Some(weights) = arguments.shelf.clear() {
            Budget::at(self.desk.clone()).clear(weights).await?;
        }
        Ok(())
    }

    async fn budget_died(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        reason: &str,
    ) -> Result<(), ActorProcessingErr> {
        match self.budget_restarts.died(0, self.born.elapsed()) {
            Decision::Restart { after, .. } => {
                tokio::time::sleep(after).await;
                self.budget = spawn_budget(myself, &self.device, &self.ledger, self.canary, &self.desk).await?;
                Ok(())
            }
            Decision::GiveUp { restarts, .. } => {
                Err(format!("the budget was restarted {restarts} times, the last after: {reason}").into())
            }
        }
    }
}

/// Brings home what the attempts of an engine may have held. Its threads end first: a late use of memory that was taken
/// back would end the process.
async fn clear_engine(arguments: &EngineArguments, desk: &Arc<Desk>) -> Result<(), ActorProcessingErr> {
    arguments.shelf.quench_lanes().await;
    let last_attempt = (arguments.generation + 1) * u64::from(ATTEMPTS_MAX) - 1;
    let owner = Owner::new(format!("{} engine", arguments.label), last_attempt);
    Budget::at(desk.clone()).clear(owner).await?;
    Ok(())
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
