//! Pure: the decisions of a runtime about its models, its budget and its device.
//!
//! ```text
//! model   wanted ──► unloading ──► ending ──► gone   engine restarts while wanted or unloading
//!            └───────────────────────▲               engine gave up, or did not start
//! device  present ◄──► lost                          models restart on the new device
//! ```
//!
//! A model is unloading once its unload is requested, its loader gives up, or the runtime shuts
//! down. A wanted model may sleep: see `core/sleep.rs`.

mod child;
mod effect;
mod input;
mod model;
mod sleep;
mod sleep_state;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    time::Duration,
};

use bursar_budgets::DeviceError;

use self::{
    child::{Child, Verdict},
    model::{Ended, Model},
    sleep_state::SleepState,
};
pub use self::{
    effect::Effect,
    input::{Input, Load, Parts},
    sleep_state::IdleReport,
};
use crate::{budget::NO_MODEL, sleep::SleepLevel, supervise::Intensity};

/// Settings that are fixed for a runtime.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// How many restarts of the budget are tolerated, and within what time.
    pub budget: Intensity,
    /// How many losses of the device are survived, and within what time.
    pub device: Intensity,
    /// Whether a lost device can be replaced.
    pub has_successor: bool,
    /// If set, models are put to sleep to free memory for other models. A model with requests stays
    /// awake for at least this long.
    pub turn: Option<Duration>,
}

/// The state of one runtime, and its decisions.
pub struct RuntimeCore<P: Parts> {
    rules: Rules,
    device: Child,
    /// `Some` while the device is lost and everything on it is being ended. Contains the loads that
    /// wait for the new device.
    lost: Option<Vec<Load<P>>>,
    budget: Child,
    models: BTreeMap<String, Model<P::Waiter, P::Sleeper>>,
    /// Names of the models that wait for their turn to start, in queue order.
    waiting: VecDeque<String>,
    /// Generation of the next engine. A load is identified by the generation of its first engine.
    next_generation: u64,
    shutdown: Option<Shutdown<P::Waiter>>,
    /// Effects of the step in progress.
    effects: Vec<Effect<P>>,
}

/// A shutdown in progress.
pub struct Shutdown<W> {
    /// The callers that wait for the shutdown.
    pub waiters: Vec<W>,
    /// Number of aborted requests. Only models that began to end after the first shutdown request
    /// are counted.
    pub cut_off: usize,
}

const SHUT_DOWN: &str = "the runtime was shut down";
const UNLOADED: &str = "it was unloaded";
const NOT_STARTED: &str = "it did not start";

impl<P: Parts> RuntimeCore<P> {
    /// Returns the state of a runtime with a device and a budget, and no models yet.
    pub fn new(rules: Rules) -> Self {
        RuntimeCore {
            device: Child::new(rules.device),
            lost: None,
            budget: Child::new(rules.budget),
            models: BTreeMap::new(),
            waiting: VecDeque::new(),
            next_generation: 0,
            shutdown: None,
            effects: Vec::new(),
            rules,
        }
    }

    /// Whether the model is unloading. Such a model takes no more requests, and gauges do not show
    /// it after its end.
    pub fn is_forgotten(&self, name: &str) -> bool {
        self.models.get(name).is_some_and(Model::is_forgotten)
    }

    /// Removes and returns the shutdown, if one was requested, so that its callers can be answered.
    pub fn take_shutdown(&mut self) -> Option<Shutdown<P::Waiter>> {
        self.shutdown.take()
    }

    /// Processes one input at `now`, a time since any fixed moment. Returns the effects to execute,
    /// in order.
    pub fn step(&mut self, input: Input<P>, now: Duration) -> Vec<Effect<P>> {
        match input {
            Input::Load(load) => self.load(load, now),
            Input::Unload { name, within, waiter } => {
                self.effects.push(Effect::ForgetDead { name: name.clone() });
                self.leave(name, within, Some(waiter));
            }
            Input::Forget { name, load, waiter } => self.forget(name, load, waiter),
            Input::Due { name, load } => self.due(name, load),
            Input::Ended { name, load, cut_off } => self.ended(name, load, cut_off),
            Input::EngineGaveUp { name, reason } => self.end(name, reason),
            Input::EngineDied { name, reason } => self.engine_died(name, reason, now),
            Input::Respawn { name, load, death } => self.respawn(name, load, death),
            Input::BudgetDied { reason } => self.budget_died(reason, now),
            Input::RespawnBudget { death } => self.respawn_budget(death),
            Input::DeviceLost(error) => self.device_lost(error, now),
            Input::DeviceMade(made) => self.device_made(made, now),
            Input::Sleep { name, load, level, within, sleeper } => self.sleep(name, load, (level, within), sleeper),
            Input::Wake { name, load, reason } => self.wake(name, load, reason, now),
            Input::Drained { name, load, drained } => self.drained(name, load, drained, now),
            Input::FellAsleep { name, load, level } => self.fell_asleep(name, load, level, now),
            Input::Woken { name, load } => self.woken(name, load, now),
            Input::NotWoken { name, may_fit } => self.not_woken(name, may_fit),
            Input::IdleReports(seen) => self.check_idle(&seen, now),
            Input::ShutDown { within, waiter } => self.shut_down(within, waiter),
        }
        if self.shutdown.is_some() && self.models.is_empty() {
            self.effects.push(Effect::Stop);
        }
        mem::take(&mut self.effects)
    }

    fn load(&mut self, load: Load<P>, now: Duration) {
        if self.shutdown.is_some() {
            return self.effects.push(Effect::Refuse(load.request));
        }
        if let Some(waiting) = &mut self.lost {
            return waiting.push(load);
        }
        let name = self.free_name(load.name);
        let generation = self.take_generation();
        self.models.insert(name.clone(), Model::new(generation, load.intensity, load.sleep_after, now));
        self.effects.push(Effect::ForgetDead { name: name.clone() });
        self.effects.push(Effect::Begin { name, generation, request: load.request });
    }

    fn free_name(&self, name: String) -> String {
        // A model named `NO_MODEL` would share a gate with the leases of the user's own code, which
        // have this name as their label.
        let is_free = |name: &String| !self.models.contains_key(name) && name != NO_MODEL;
        let numbered = (2u64..).map(|number| format!("{name} {number}"));
        std::iter::once(name.clone()).chain(numbered).find(is_free).expect("some numbered name is free")
    }

    fn take_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation - 1
    }

    fn of_load(&mut self, name: &str, load: u64) -> Option<&mut Model<P::Waiter, P::Sleeper>> {
        self.models.get_mut(name).filter(|model| model.load == load)
    }

    fn answer(&mut self, waiters: impl IntoIterator<Item = P::Waiter>, cut_off: usize) {
        self.effects.extend(waiters.into_iter().map(|waiter| Effect::Answer { waiter, cut_off }));
    }

    /// Stops a model from taking requests. The model ends when its running requests have ended,
    /// or at the deadline.
    fn leave(&mut self, name: String, within: Duration, waiter: Option<P::Waiter>) {
        let Some(model) = self.models.get_mut(&name) else { return self.answer(waiter, 0) };
        model.forgotten(waiter);
        self.effects.push(Effect::Close { load: model.load, name, within });
    }

    fn forget(&mut self, name: String, load: u64, waiter: Option<P::Waiter>) {
        let Some(model) = self.of_load(&name, load) else { return self.answer(waiter, 0) };
        model.forgotten(waiter);
        self.end(name, NOT_STARTED.to_owned());
    }

    fn due(&mut self, name: String, load: u64) {
        let reason = if self.shutdown.is_some() { SHUT_DOWN } else { UNLOADED };
        if self.of_load(&name, load).is_some() {
            self.end(name, reason.to_owned());
        }
    }

    /// Starts ending a model, unless it is already ending. If its memory is being released for a
    /// sleep, the model ends after the release.
    fn end(&mut self, name: String, reason: String) {
        let of_shutdown = self.shutdown.is_some();
        let Some(model) = self.models.get_mut(&name) else { return };
        let is_going = model.is_going();
        if let SleepState::Releasing(releasing) = &mut model.sleep_state
            && is_going
        {
            releasing.end.get_or_insert(reason);
        } else if model.end(of_shutdown) {
            self.effects.push(Effect::End { load: model.load, name: name.clone(), reason });
            self.end_sleep_state(&name);
        }
    }

    fn ended(&mut self, name: String, load: u64, cut_off: usize) {
        if self.of_load(&name, load).is_none() {
            return;
        }
        let Some(Ended { forgotten, of_shutdown }) = self.models.remove(&name).map(Model::into_ended) else { return };
        if let (true, Some(shutdown)) = (of_shutdown, &mut self.shutdown) {
            shutdown.cut_off += cut_off;
        }
        self.effects.push(Effect::Gone { name, is_forgotten: forgotten.is_some() });
        self.answer(forgotten.into_iter().flatten(), cut_off);
        self.admit_waiting_again();
    }

    /// Called when an engine and its actors have died. Once the engine's memory is returned, the
    /// engine starts again with the same weights.
    fn engine_died(&mut self, name: String, reason: String, now: Duration) {
        // Models on a lost device restart on its successor.
        let model = self.models.get_mut(&name).filter(|model| self.lost.is_none() && model.sleep_state.has_engine());
        let Some(model) = model else { return };
        let load = model.load;
        match model.engine().map(|engine| engine.died(now)) {
            Some(Verdict::Again { death, wait }) => {
                self.effects.push(Effect::RespawnAfter { name, load, death, wait, reason });
            }
            Some(Verdict::CrashLoop { restarts }) => {
                self.end(name, format!("its engine was restarted {restarts} times; the last failure: {reason}"));
            }
            None => {}
        }
    }

    fn respawn(&mut self, name: String, load: u64, death: u64) {
        let is_lost = self.lost.is_some();
        let model = self.of_load(&name, load).filter(|model| model.sleep_state.has_engine());
        let engine = model.and_then(Model::engine);
        if !is_lost && engine.is_some_and(|engine| engine.restart(death)) {
            self.spawn(name);
        }
    }

    fn spawn(&mut self, name: String) {
        let generation = self.take_generation();
        self.effects.push(Effect::Respawn { name, generation });
    }

    fn budget_died(&mut self, reason: String, now: Duration) {
        match self.budget.died(now) {
            Verdict::Again { death, wait } => self.effects.push(Effect::RespawnBudgetAfter { death, wait, reason }),
            Verdict::CrashLoop { restarts } => {
                let reason = format!("the budget was restarted {restarts} times; the last failure: {reason}");
                self.effects.push(Effect::Fail { reason });
            }
        }
    }

    fn respawn_budget(&mut self, death: u64) {
        if self.budget.restart(death) {
            self.effects.push(Effect::SpawnBudget);
        }
    }

    /// Ends everything on the device, and requests a new device if one is allowed.
    fn device_lost(&mut self, error: DeviceError, now: Duration) {
        if self.lost.is_some() {
            return;
        }
        self.lost = Some(Vec::new());
        let is_tolerated = matches!(self.device.died(now), Verdict::Again { .. });
        let replace = is_tolerated && self.rules.has_successor && self.shutdown.is_none();
        let models = self.going();
        self.effects.push(Effect::LoseDevice { error, models, replace });
    }

    /// Restarts the models on the new device, or ends the runtime if there is no new device.
    fn device_made(&mut self, made: Result<P::Device, DeviceError>, now: Duration) {
        let device = match made {
            Ok(device) => device,
            // The runtime is shutting down, so its models end and need no new device.
            Err(_) if self.shutdown.is_some() => return,
            Err(error) => return self.effects.push(Effect::Fail { reason: error.to_string() }),
        };
        self.budget.replaced();
        self.effects.push(Effect::TakeDevice(device));
        for name in self.going() {
            let Some(model) = self.models.get_mut(&name) else { continue };
            model.engine().into_iter().for_each(Child::replaced);
            match &mut model.sleep_state {
                // Weights that a level 1 sleep kept in host memory belonged to the lost device.
                SleepState::Asleep(level) => *level = SleepLevel::Level2,
                sleep_state if sleep_state.has_engine() => self.spawn(name),
                _ => {}
            }
        }
        let waiting = self.lost.take();
        waiting.into_iter().flatten().for_each(|load| self.load(load, now));
        self.admit_waiting_again();
    }

    /// Returns the models that are not ending.
    fn going(&mut self) -> Vec<String> {
        let going = self.models.iter_mut().filter_map(|(name, model)| model.engine().map(|_| name.clone()));
        going.collect()
    }

    fn shut_down(&mut self, within: Duration, waiter: P::Waiter) {
        let begun = self.shutdown.get_or_insert(Shutdown { waiters: Vec::new(), cut_off: 0 });
        begun.waiters.push(waiter);
        let refused = self.lost.iter_mut().flat_map(mem::take);
        self.effects.extend(refused.map(|load| Effect::Refuse(load.request)));
        for name in self.models.keys().cloned().collect::<Vec<_>>() {
            self.leave(name, within, None);
        }
    }
}

#[cfg(test)]
mod tests;
