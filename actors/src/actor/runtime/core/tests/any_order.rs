//! Invariants that hold for any inputs in any order: a model has at most one engine, each waiter is
//! answered once, and a shutdown ends.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::*;
use crate::{
    metric::WakeReason,
    sleep::{SleepError, SleepLevel},
};

struct NumberedParts;

impl Parts for NumberedParts {
    type LoadRequest = u64;
    type Waiter = u64;
    type Sleeper = u64;
    type Device = ();
}

const NAMES: [&str; 2] = ["one", "two"];

/// The actors that a runtime controls, and the inputs that they will send.
struct World {
    core: RuntimeCore<NumberedParts>,
    now: Duration,
    /// Inputs that will arrive later, in any order.
    promised: Vec<Input<NumberedParts>>,
    /// For each model: whether an engine runs.
    models: BTreeMap<String, bool>,
    has_budget: bool,
    has_device: bool,
    /// Waiters and loaders without an answer.
    waiting: BTreeSet<u64>,
    /// Models that were asked to wake up, and whose wake has not yet succeeded or failed.
    wanted: BTreeSet<String>,
    next: u64,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Stopped,
    Failed,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Promised(usize),
    Load(usize),
    Unload(usize),
    Forget(usize, u64),
    EngineDies(usize),
    EngineGivesUp(usize),
    Sleep(usize, u64, u8),
    Wake(usize, u64),
    DoesNotStart(usize, bool),
    BudgetDies,
    DeviceIsLost,
    ShutDown,
}

fn events() -> impl Strategy<Value = Event> {
    let name = 0..NAMES.len();
    prop_oneof![
        8 => any::<usize>().prop_map(Event::Promised),
        3 => name.clone().prop_map(Event::Load),
        2 => name.clone().prop_map(Event::Unload),
        1 => (name.clone(), 0u64..8).prop_map(|(name, load)| Event::Forget(name, load)),
        3 => name.clone().prop_map(Event::EngineDies),
        1 => name.clone().prop_map(Event::EngineGivesUp),
        2 => (name.clone(), 0u64..4, 1u8..3).prop_map(|(name, load, level)| Event::Sleep(name, load, level)),
        2 => (name.clone(), 0u64..4).prop_map(|(name, load)| Event::Wake(name, load)),
        2 => (name, any::<bool>()).prop_map(|(name, may_fit)| Event::DoesNotStart(name, may_fit)),
        1 => Just(Event::BudgetDies),
        1 => Just(Event::DeviceIsLost),
        1 => Just(Event::ShutDown),
    ]
}

fn lost() -> DeviceError {
    DeviceError::Lost { reason: "a bug".to_owned() }
}

impl World {
    fn new(turn: Option<Duration>) -> Self {
        let intensity = Intensity { restarts_max: 3, within: Duration::from_secs(1), back_off: Duration::ZERO };
        World {
            core: RuntimeCore::new(Rules { budget: intensity, device: intensity, has_successor: true, turn }),
            now: Duration::ZERO,
            promised: Vec::new(),
            models: BTreeMap::new(),
            has_budget: true,
            has_device: true,
            waiting: BTreeSet::new(),
            wanted: BTreeSet::new(),
            next: 0,
            end: None,
        }
    }

    fn waiter(&mut self) -> u64 {
        self.next += 1;
        self.waiting.insert(self.next);
        self.next
    }

    fn happen(&mut self, event: Event) {
        let name = |name: usize| NAMES[name].to_owned();
        let input = match event {
            Event::Promised(_) if self.promised.is_empty() => return,
            Event::Promised(which) => self.promised.swap_remove(which % self.promised.len()),
            Event::Load(which) => {
                let intensity = Intensity::ENGINE;
                Input::Load(Load {
                    name: name(which),
                    intensity,
                    sleep_after: Some(Duration::ZERO),
                    request: self.waiter(),
                })
            }
            Event::Unload(which) => Input::Unload { name: name(which), within: Duration::ZERO, waiter: self.waiter() },
            Event::Forget(which, load) => Input::Forget { name: name(which), load, waiter: Some(self.waiter()) },
            Event::EngineDies(which) if self.dies(which) => {
                Input::EngineDied { name: name(which), reason: "a bug".to_owned() }
            }
            Event::EngineGivesUp(which) if self.dies(which) => {
                Input::EngineGaveUp { name: name(which), reason: "it gave up".to_owned() }
            }
            Event::Sleep(which, load, level) => {
                let (level, within) = (level.try_into().expect("there are two levels"), Duration::ZERO);
                Input::Sleep { name: name(which), load, level, within, sleeper: self.waiter() }
            }
            Event::Wake(which, load) => {
                let model = self.core.of_load(NAMES[which], load);
                if model.is_some_and(|model| {
                    model.is_going() && !matches!(model.sleep_state, sleep_state::SleepState::Awake { .. })
                }) {
                    self.wanted.insert(name(which));
                }
                Input::Wake { name: name(which), load, reason: WakeReason::Call }
            }
            Event::DoesNotStart(which, may_fit) if self.dies(which) => Input::NotWoken { name: name(which), may_fit },
            Event::BudgetDies if self.has_budget => {
                self.has_budget = false;
                Input::BudgetDied { reason: "a bug".to_owned() }
            }
            Event::DeviceIsLost if self.has_device => {
                self.has_device = false;
                Input::DeviceLost(lost())
            }
            Event::ShutDown => Input::ShutDown { within: Duration::ZERO, waiter: self.waiter() },
            _ => return,
        };
        self.give(input);
    }

    /// Returns whether an engine of the model runs, and stops it.
    fn dies(&mut self, which: usize) -> bool {
        self.models.get_mut(NAMES[which]).is_some_and(mem::take)
    }

    fn give(&mut self, input: Input<NumberedParts>) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            self.now += Duration::from_millis(10);
            for effect in self.core.step(input, self.now) {
                match effect {
                    Effect::ReportIdle => {
                        let reports = self.check_idle();
                        inputs.push_back(reports);
                    }
                    effect => self.carry_out(effect),
                }
            }
        }
    }

    /// Returns idle reports. Whether a model is idle changes from one call to the next.
    fn check_idle(&mut self) -> Input<NumberedParts> {
        self.next += 1;
        let seen = |(at, name): (usize, &String)| {
            let is_busy = (self.next + at as u64).is_multiple_of(3);
            let is_awaited = is_busy || self.wanted.contains(name);
            IdleReport { name: name.clone(), idle_for: (!is_awaited).then_some(Duration::ZERO), is_awaited }
        };
        Input::IdleReports(self.models.keys().enumerate().map(seen).collect())
    }

    fn carry_out(&mut self, effect: Effect<NumberedParts>) {
        match effect {
            Effect::Refuse(request) => self.answered(request),
            Effect::ForgetDead { .. } => {}
            Effect::Begin { name, generation, request } => {
                assert!(self.has_device, "engines start only on a device");
                assert_eq!(self.models.insert(name.clone(), true), None, "model names are unique");
                self.promised.push(Input::Woken { name, load: generation });
                self.answered(request);
            }
            Effect::RespawnAfter { name, load, death, .. } => {
                assert!(!self.models[&name], "the engine of the respawned model is dead");
                self.promised.push(Input::Respawn { name, load, death });
            }
            Effect::Respawn { name, .. } => {
                assert!(self.has_device, "engines start only on a device");
                assert_eq!(self.models.insert(name, true), Some(false), "each model has one engine at a time");
            }
            Effect::Close { name, load, .. } => self.promised.push(Input::Due { name, load }),
            Effect::End { name, load, .. } => {
                self.models.insert(name.clone(), false);
                self.promised.push(Input::Ended { name, load, cut_off: 1 });
            }
            Effect::Gone { name, .. } => {
                self.wanted.remove(&name);
                assert_eq!(self.models.remove(&name), Some(false), "the removed engine is dead");
            }
            Effect::Answer { waiter, .. } => self.answered(waiter),
            Effect::RespawnBudgetAfter { death, .. } => self.promised.push(Input::RespawnBudget { death }),
            Effect::SpawnBudget => assert!(!mem::replace(&mut self.has_budget, true), "there is one budget at a time"),
            Effect::LoseDevice { models, replace, .. } => {
                self.models.extend(models.into_iter().map(|name| (name, false)));
                assert!(self.models.values().all(|runs| !runs), "no engine runs on a lost device");
                self.promised.push(Input::DeviceMade(if replace { Ok(()) } else { Err(lost()) }));
            }
            Effect::TakeDevice(()) => {
                self.has_budget = true;
                self.has_device = true;
            }
            Effect::BeginSleep { name, load, .. } => {
                self.next += 1;
                let busy = SleepError::Busy { running: 1, within: Duration::ZERO };
                let drained = if self.next.is_multiple_of(2) { Err(busy) } else { Ok(()) };
                self.promised.push(Input::Drained { name, load, drained });
            }
            Effect::ReleaseEngine { name, load, level } => {
                self.models.insert(name.clone(), false);
                self.promised.push(Input::FellAsleep { name, load, level: level.unwrap_or(SleepLevel::Level1) });
            }
            Effect::Wake { name, load, .. } => {
                assert!(self.has_device, "engines start only on a device");
                assert_eq!(self.models.insert(name.clone(), true), Some(false), "each model has one engine at a time");
                self.promised.push(Input::Woken { name, load });
            }
            Effect::ReportIdleLater { .. } => {
                let reports = self.check_idle();
                self.promised.push(reports);
            }
            Effect::AnswerSleeper { sleeper, .. } => self.answered(sleeper),
            Effect::ReportIdle => unreachable!("this effect was handled above"),
            Effect::StayAwake { name } | Effect::ShowAwake { name, .. } | Effect::ReportNotWoken { name } => {
                self.wanted.remove(&name);
            }
            Effect::ShowAsleep { .. } | Effect::ShowWaking { .. } | Effect::FailStart { .. } => {}
            // Waiters get an error, because the runtime has ended.
            Effect::Fail { .. } => self.end = Some(End::Failed),
            Effect::Stop => {
                assert!(self.models.is_empty(), "all memory is returned");
                let shutdown = self.core.take_shutdown().expect("the runtime is shut down");
                shutdown.waiters.into_iter().for_each(|waiter| self.answered(waiter));
                self.end = Some(End::Stopped);
            }
        }
    }

    fn answered(&mut self, waiter: u64) {
        assert!(self.waiting.remove(&waiter), "each waiter is answered once");
    }
}

proptest! {
    #[test]
    fn every_model_ends_and_every_caller_is_answered(
        happened in prop::collection::vec(events(), 0..80),
        takes_turns in any::<bool>(),
    ) {
        let mut world = World::new(takes_turns.then_some(Duration::from_millis(50)));
        for event in happened.into_iter().chain([Event::ShutDown]) {
            if world.end.is_none() {
                world.happen(event);
            }
        }
        // Deliver all inputs that are due.
        for _ in 0..1000 {
            if world.end.is_none() {
                world.happen(Event::Promised(0));
            }
        }
        prop_assert!(world.end.is_some(), "{} promised inputs are left", world.promised.len());
        if world.end == Some(End::Stopped) {
            prop_assert!(world.waiting.is_empty(), "requests without an answer: {:?}", world.waiting);
        }
    }

    #[test]
    fn every_requested_wake_succeeds_or_reports_a_failure(
        happened in prop::collection::vec(events(), 0..80),
        takes_turns in any::<bool>(),
    ) {
        let mut world = World::new(takes_turns.then_some(Duration::from_millis(50)));
        let happened = happened.into_iter().filter(|event| !matches!(event, Event::ShutDown));
        for event in happened.chain([Event::Promised(0); 1000]) {
            if world.end.is_none() {
                world.happen(event);
            }
        }
        if world.end.is_none() {
            prop_assert!(world.wanted.is_empty(), "models that wait forever: {:?}", world.wanted);
        }
    }
}
