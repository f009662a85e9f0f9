//! Tasks that put models to sleep and wake them up, according to the core's decisions.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Bytes, Class, Gate, Hint, Memory, Request};
use ractor::{ActorProcessingErr, ActorRef};
use tokio::{task::JoinSet, time::Instant};
use tracing::{debug, warn};

use super::{
    RuntimeState,
    memory::{clear_weights, release_memory},
    start::{await_ready, spawn_engine},
};
use crate::{
    engine::{EngineArguments, StartError, Status},
    event::Event,
    metric::{self, SleepReason, WakeReason},
    runtime::{
        RuntimeMessage,
        core::{IdleReport, Input},
    },
    sleep::{NotWoken, SleepError, SleepLevel, WakeState},
    tree,
};

impl RuntimeState {
    fn arguments(&self, name: &str) -> EngineArguments {
        self.engines[name].arguments.clone()
    }

    /// Returns how long running requests may still take if the sleep was not requested by a caller.
    /// Requests that arrive in the meantime wait, and fail if they are not admitted within
    /// `wake_within`. The returned time is therefore half of `wake_within` at first. It doubles
    /// each time that the running requests did not end in time.
    pub(super) fn time_to_free_memory(&self, name: &str, stayed_busy: u32) -> Duration {
        (self.engines[name].arguments.options.wake_within / 2).saturating_mul(2u32.pow(stayed_busy.min(20)))
    }

    pub(super) fn begin_sleep(
        &self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        load: u64,
        level: Option<SleepLevel>,
        within: Duration,
    ) {
        let (myself, arguments) = (myself.clone(), self.arguments(&name));
        arguments.wakefulness.set(WakeState::Draining);
        tokio::spawn(async move {
            let drained = drain(&arguments, level, within).await;
            drop(myself.send_message(RuntimeMessage::Input(Input::Drained { name, load, drained })));
        });
    }

    pub(super) fn release_engine(
        &self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        load: u64,
        level: Option<SleepLevel>,
    ) {
        let (myself, (cell, arguments)) = (myself.clone(), self.engines[&name].place());
        tokio::spawn(async move {
            let started = Instant::now();
            // The engine's child actors die with it.
            drop(cell.kill_and_wait(None).await);
            let dead = started.elapsed();
            release_memory(&arguments).await;
            let on_released = started.elapsed();
            let level = put_weights_away(&arguments, level).await;
            // Freeze the gate, because a failed wake leaves it open. While a gate is open, memory
            // that other processes take is not counted.
            drop(arguments.budget.move_gate(arguments.label.clone(), Gate::Frozen).await);
            debug!(model = %arguments.label, ?dead, ?on_released, away = ?started.elapsed(), "fell asleep");
            drop(myself.send_message(RuntimeMessage::Input(Input::FellAsleep { name, load, level })));
        });
    }

    pub(super) fn stay_awake(&self, name: &str) {
        let EngineArguments { weight_store, wakefulness, .. } = &self.engines[name].arguments;
        weight_store.give_copy_back();
        wakefulness.set(WakeState::Awake);
    }

    pub(super) fn show_asleep(&self, name: &str, level: SleepLevel, reason: Option<SleepReason>) {
        let EngineArguments { label, budget, wakefulness, status, .. } = &self.engines[name].arguments;
        if let Some(reason) = reason {
            metric::SLEEPS_TOTAL.add(&(label.clone(), reason), 1);
            budget.record(Event::Asleep { model: label.clone(), level: level.into() });
        }
        status.show_last();
        wakefulness.set(WakeState::Asleep(level));
    }

    pub(super) fn show_waking(&self, name: &str) {
        self.engines[name].arguments.wakefulness.set(WakeState::Waking);
    }

    pub(super) async fn wake(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        load: u64,
        generation: u64,
    ) -> Result<(), ActorProcessingErr> {
        let engine = self.engines.get_mut(&name).expect("the core names a known model");
        engine.arguments.generation = generation;
        engine.arguments.show(Status::Starting);
        engine.arguments.wakefulness.set(WakeState::Waking);
        engine.cell = spawn_engine(myself, &engine.arguments).await?;
        tokio::spawn(await_ready(myself.clone(), name, load, &engine.arguments));
        Ok(())
    }

    pub(super) fn show_awake(&self, name: &str, reason: Option<WakeReason>, took: Duration) {
        let EngineArguments { label, budget, weight_store, wakefulness, .. } = &self.engines[name].arguments;
        weight_store.give_copy_back();
        if let Some(reason) = reason {
            metric::WAKES_TOTAL.add(&(label.clone(), reason), 1);
            metric::WAKE_SECONDS.record(label, took);
            budget.record(Event::Awake { model: label.clone() });
        }
        wakefulness.set(WakeState::Awake);
    }

    /// If the model's engine did not start, returns the engine's error.
    fn not_started(&self, name: &str) -> Option<Arc<StartError>> {
        match &*self.engines[name].arguments.status.borrow() {
            Status::NotWoken(error) => Some(error.clone()),
            _ => None,
        }
    }

    pub(super) fn report_not_woken(&self, name: &str) {
        let EngineArguments { label, budget, weight_store, wakefulness, .. } = &self.engines[name].arguments;
        let failure = match self.not_started(name) {
            Some(error) => NotWoken {
                reason: error.to_string().into(),
                hint: error.hint().into(),
                lacks_memory: self.lacks(name, &error).is_some(),
            },
            None => NotWoken {
                reason: "no other model could free memory for it".into(),
                hint: "wake the model again".into(),
                lacks_memory: true,
            },
        };
        budget.record(Event::NotWoken { model: label.clone(), reason: failure.reason.to_string() });
        let level = if weight_store.has_copy() { SleepLevel::Level1 } else { SleepLevel::Level2 };
        wakefulness.fail(level, failure);
    }

    pub(super) fn fail_start(&self, name: &str) {
        if let Some(error) = self.not_started(name) {
            self.engines[name].arguments.show(Status::Failed(error));
        }
    }

    /// Returns the device memory that a model lacked when it did not start, or 0 if the amount is
    /// unknown. Returns `None` if memory was not the cause.
    fn lacks(&self, name: &str, error: &StartError) -> Option<Bytes> {
        match error {
            StartError::DoesNotFit(_) if self.engines[name].arguments.options.kv().is_pinned() => error.short_by(),
            StartError::DoesNotFit(_) => Some(error.short_by().unwrap_or_default()),
            StartError::Profile { source, .. } => source.is_out_of_memory().then_some(Bytes::ZERO),
            _ => None,
        }
    }

    /// Whether a model that did not start lacked memory, and other models hold at least as much
    /// device memory as it lacked.
    pub(super) fn may_fit(&self, name: &str, error: &StartError) -> bool {
        let lacks = self.lacks(name, error);
        let is_others = |model: &str| model != name && self.engines.contains_key(model);
        let leases = self.settings.mailbox().leases();
        let held = leases.iter().filter(|lease| lease.class.memory() == Memory::Device);
        let held: Bytes = held.filter(|lease| is_others(lease.model.as_str())).map(|lease| lease.bytes).sum();
        lacks.is_some_and(|lacks| lacks <= held && !held.is_zero())
    }

    /// Returns the idle report of each model.
    pub(super) fn seen(&self) -> Vec<IdleReport> {
        let seen = |(name, engine): (&String, &super::Engine)| {
            let wakefulness = &engine.arguments.wakefulness;
            let (idle_for, is_awaited) = (wakefulness.idle_for(), wakefulness.is_awaited());
            IdleReport { name: name.clone(), idle_for, is_awaited }
        };
        self.engines.iter().map(seen).collect()
    }

    pub(super) fn look_later(&mut self, myself: &ActorRef<RuntimeMessage>, busy: &[String], within: Duration) {
        let mut ends = JoinSet::new();
        for name in busy {
            let wakefulness = self.engines[name].arguments.wakefulness.clone();
            ends.spawn(async move { wakefulness.idle().await });
        }
        let myself = myself.clone();
        let mut look = JoinSet::new();
        look.spawn(async move {
            drop(tokio::time::timeout(within, ends.join_next()).await);
            drop(myself.send_message(RuntimeMessage::CheckIdle));
        });
        // Replacing the previous task aborts it.
        self.look = look;
    }
}

/// Leases host memory for the weights, unless `level` is level 2, and waits up to `within` until no
/// request is running. Without a `level`, a refused lease is ignored.
async fn drain(arguments: &EngineArguments, level: Option<SleepLevel>, within: Duration) -> Result<(), SleepError> {
    let EngineArguments { label, budget, weight_store, wakefulness, device, .. } = arguments;
    if let (Some(segment), true) = (weight_store.segment(), level != Some(SleepLevel::Level2)) {
        let bytes = segment.backed() * device.ranks().len().max(1) as u64;
        let request = Request::new(arguments.sleep_owner(), Class::Host, label.clone(), bytes);
        weight_store.spare_is_gone().await;
        match (budget.ask(tree::LEASE_FOR_SLEEP, request, false).await, level) {
            (Ok(lease), _) => {
                weight_store.keep_host(lease);
                weight_store.copy_ahead(arguments.last_owner().generation);
            }
            (Err(error), Some(_)) => return Err(SleepError::Host(Arc::new(error))),
            (Err(_), None) => {}
        }
    }
    if tokio::time::timeout(within, wakefulness.empty()).await.is_err() {
        let running = wakefulness.inside();
        weight_store.give_copy_back();
        return Err(SleepError::Busy { running, within });
    }
    Ok(())
}

/// Moves the weights to host memory or drops them, and releases their device memory. No thread may
/// use the weights any more. Returns the sleep level that was reached.
async fn put_weights_away(arguments: &EngineArguments, level: Option<SleepLevel>) -> SleepLevel {
    let EngineArguments { label, budget, weight_store, kept, .. } = arguments;
    if level != Some(SleepLevel::Level2) {
        let putting = weight_store.clone();
        let put = tokio::task::spawn_blocking(move || putting.put_away()).await;
        match (put, weight_store.segment()) {
            (Ok(Ok(true)), Some(segment)) => {
                // The resize fails only if the runtime has ended and has no budget actor.
                drop(budget.resize(tree::LEASE_FOR_SLEEP, segment.lease(), Bytes::ZERO).await);
                return SleepLevel::Level1;
            }
            (Ok(Err(error)), _) => {
                warn!(model = %label, %error, "the weights could not be copied to host memory and are dropped")
            }
            _ => {}
        }
    }
    clear_weights(arguments).await;
    kept.close();
    SleepLevel::Level2
}
