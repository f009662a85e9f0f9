//! Scenarios of a runtime, with the effects that they cause. Names represent loads, waiters and
//! devices.

use super::*;

mod any_order;
mod sleep;

struct Names;

impl Parts for Names {
    type LoadRequest = &'static str;
    type Waiter = &'static str;
    type Sleeper = &'static str;
    type Device = &'static str;
}

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn intensity(restarts_max: usize) -> Intensity {
    Intensity { restarts_max, within: 10 * SECOND, back_off: MS }
}

fn rules() -> Rules {
    Rules { budget: intensity(2), device: intensity(1), has_successor: true, turn: None }
}

/// A runtime core and the current time.
struct Bed {
    core: RuntimeCore<Names>,
    now: Duration,
}

fn bed(rules: Rules) -> Bed {
    Bed { core: RuntimeCore::new(rules), now: Duration::ZERO }
}

/// A runtime with the model "demo", of load 0.
fn serving() -> Bed {
    let mut bed = bed(rules());
    bed.load("demo");
    bed
}

fn lost() -> DeviceError {
    DeviceError::Lost { reason: text("an illegal address") }
}

fn text(text: &str) -> String {
    text.to_owned()
}

impl Bed {
    fn give(&mut self, input: Input<Names>) -> Vec<String> {
        self.core.step(input, self.now).iter().map(described).collect()
    }

    fn load(&mut self, name: &'static str) -> Vec<String> {
        self.give(Input::Load(Load {
            name: text(name),
            intensity: intensity(2),
            sleep_after: Some(60 * SECOND),
            request: name,
        }))
    }

    fn unload(&mut self, name: &str, waiter: &'static str) -> Vec<String> {
        self.give(Input::Unload { name: text(name), within: SECOND, waiter })
    }

    fn due(&mut self, name: &str, load: u64) -> Vec<String> {
        self.give(Input::Due { name: text(name), load })
    }

    fn ended(&mut self, name: &str, load: u64, cut_off: usize) -> Vec<String> {
        self.give(Input::Ended { name: text(name), load, cut_off })
    }

    fn engine_died(&mut self, name: &str) -> Vec<String> {
        self.give(Input::EngineDied { name: text(name), reason: text("a bug") })
    }

    fn respawn(&mut self, name: &str, load: u64, death: u64) -> Vec<String> {
        self.give(Input::Respawn { name: text(name), load, death })
    }

    fn shut_down(&mut self, waiter: &'static str) -> Vec<String> {
        self.give(Input::ShutDown { within: SECOND, waiter })
    }
}

fn described(effect: &Effect<Names>) -> String {
    match effect {
        Effect::Refuse(request) => format!("refuse {request}"),
        Effect::ForgetDead { name } => format!("forget failed {name}"),
        Effect::Begin { name, generation, request } => format!("begin {name} as {generation} for {request}"),
        Effect::RespawnAfter { name, load, death, wait, reason } => {
            format!("respawn {name} of {load} after death {death} and {wait:?}: {reason}")
        }
        Effect::Respawn { name, generation } => format!("respawn {name} as {generation}"),
        Effect::Close { name, load, within } => format!("close {name} of {load} within {within:?}"),
        Effect::End { name, load, reason } => format!("end {name} of {load}: {reason}"),
        Effect::Gone { name, is_forgotten: true } => format!("{name} is gone"),
        Effect::Gone { name, is_forgotten: false } => format!("{name} has failed"),
        Effect::Answer { waiter, cut_off } => format!("answer {waiter}: {cut_off}"),
        Effect::RespawnBudgetAfter { death, wait, reason } => {
            format!("respawn the budget after death {death} and {wait:?}: {reason}")
        }
        Effect::SpawnBudget => text("spawn a budget"),
        Effect::LoseDevice { models, replace, .. } => format!("lose the device under {models:?}, replace: {replace}"),
        Effect::TakeDevice(device) => format!("take {device}"),
        Effect::Fail { reason } => format!("fail: {reason}"),
        Effect::Stop => text("stop"),
        effect => sleep::described(effect),
    }
}

#[test]
fn a_used_model_name_is_numbered_until_its_model_ends() {
    let mut bed = bed(rules());
    assert_eq!(bed.load("demo"), ["forget failed demo", "begin demo as 0 for demo"]);
    assert_eq!(bed.load("demo"), ["forget failed demo 2", "begin demo 2 as 1 for demo"]);
    bed.unload("demo", "user");
    assert_eq!(bed.load("demo")[1], "begin demo 3 as 2 for demo", "the previous engine is still ending");
    bed.due("demo", 0);
    bed.ended("demo", 0, 0);
    assert_eq!(bed.load("demo")[1], "begin demo as 3 for demo");
    let tenants = bed.load(NO_MODEL);
    assert_eq!(
        tenants[0],
        format!("forget failed {NO_MODEL} 2"),
        "the label for no model is reserved, so the model gets a number"
    );
}

#[test]
fn an_unloaded_model_ends_after_its_requests_have_ended() {
    let mut bed = serving();
    assert_eq!(bed.unload("demo", "user"), ["forget failed demo", "close demo of 0 within 1s"]);
    assert!(bed.core.is_forgotten("demo"));
    assert_eq!(bed.due("demo", 0), ["end demo of 0: it was unloaded"]);
    assert_eq!(bed.ended("demo", 0, 2), ["demo is gone", "answer user: 2"]);
    assert!(!bed.core.is_forgotten("demo"));
}

#[test]
fn every_unload_of_a_model_is_answered_when_it_ends() {
    let mut bed = serving();
    bed.unload("demo", "first");
    assert_eq!(bed.unload("demo", "second"), ["forget failed demo", "close demo of 0 within 1s"]);
    assert_eq!(bed.due("demo", 0), ["end demo of 0: it was unloaded"]);
    assert!(bed.due("demo", 0).is_empty(), "the engine is ending");
    bed.unload("demo", "third");
    assert_eq!(bed.ended("demo", 0, 1), ["demo is gone", "answer first: 1", "answer second: 1", "answer third: 1"]);
}

#[test]
fn unloading_an_unknown_model_is_answered_at_once() {
    let mut bed = serving();
    assert_eq!(bed.unload("other", "user"), ["forget failed other", "answer user: 0"]);
    assert_eq!(bed.give(Input::Forget { name: text("demo"), load: 7, waiter: Some("loader") }), ["answer loader: 0"]);
    assert!(!bed.core.is_forgotten("demo"), "the request names another load");
    assert!(bed.due("demo", 7).is_empty() && bed.ended("demo", 7, 0).is_empty());
}

#[test]
fn a_model_that_fails_to_start_leaves_no_state() {
    let mut bed = serving();
    bed.give(Input::EngineGaveUp { name: text("demo"), reason: text("no memory") });
    let described = bed.give(Input::Forget { name: text("demo"), load: 0, waiter: Some("loader") });
    assert!(described.is_empty(), "the model is ending already: {described:?}");
    assert_eq!(bed.ended("demo", 0, 0), ["demo is gone", "answer loader: 0"]);
    bed.load("demo");
    let described = bed.give(Input::Forget { name: text("demo"), load: 1, waiter: None });
    assert_eq!(described, ["end demo of 1: it did not start"]);
    assert_eq!(bed.ended("demo", 1, 0), ["demo is gone"]);
}

#[test]
fn a_dead_engine_restarts_until_its_restart_limit() {
    let mut bed = serving();
    assert!(bed.respawn("demo", 0, 0).is_empty(), "the engine is running");
    assert_eq!(bed.engine_died("demo"), ["respawn demo of 0 after death 1 and 1ms: a bug"]);
    assert_eq!(bed.respawn("demo", 0, 1), ["respawn demo as 1"]);
    assert!(bed.respawn("demo", 0, 1).is_empty(), "a repeated input has no effect");
    assert_eq!(bed.engine_died("demo"), ["respawn demo of 0 after death 2 and 2ms: a bug"]);
    assert!(
        bed.respawn("demo", 0, 1).is_empty() && bed.respawn("demo", 7, 2).is_empty(),
        "a timer of another death or another load is ignored"
    );
    bed.respawn("demo", 0, 2);
    assert_eq!(bed.engine_died("demo"), ["end demo of 0: its engine was restarted 2 times; the last failure: a bug"]);
    assert_eq!(bed.ended("demo", 0, 3), ["demo has failed"]);
}

#[test]
fn an_engine_restarts_while_draining_but_not_while_ending() {
    let mut bed = serving();
    bed.unload("demo", "user");
    bed.engine_died("demo");
    assert_eq!(bed.respawn("demo", 0, 1), ["respawn demo as 1"]);
    bed.engine_died("demo");
    bed.due("demo", 0);
    assert!(bed.respawn("demo", 0, 2).is_empty() && bed.engine_died("demo").is_empty());
}

#[test]
fn models_restart_on_the_successor_of_a_lost_device() {
    let mut bed = serving();
    bed.load("leaving");
    bed.load("ending");
    bed.unload("leaving", "user");
    bed.unload("ending", "user");
    bed.due("ending", 2);
    let described = bed.give(Input::DeviceLost(lost()));
    assert_eq!(described, [r#"lose the device under ["demo", "leaving"], replace: true"#]);
    assert!(bed.give(Input::DeviceLost(lost())).is_empty(), "a repeated input has no effect");
    assert!(bed.engine_died("demo").is_empty(), "the death of the engine is expected after the loss of its device");
    assert!(bed.load("late").is_empty(), "the load waits for the device");
    let described = bed.give(Input::DeviceMade(Ok("another")));
    let begun = ["respawn demo as 3", "respawn leaving as 4", "forget failed late", "begin late as 5 for late"];
    assert_eq!(described, [&["take another"], &begun[..]].concat());
}

#[test]
fn a_restart_timer_from_before_a_device_loss_is_ignored() {
    let mut bed = serving();
    bed.engine_died("demo");
    assert_eq!(
        bed.give(Input::BudgetDied { reason: text("a bug") }),
        ["respawn the budget after death 1 and 1ms: a bug"]
    );
    bed.give(Input::DeviceLost(lost()));
    assert!(bed.respawn("demo", 0, 1).is_empty(), "no engine is respawned without a device");
    bed.give(Input::DeviceMade(Ok("another")));
    assert!(bed.respawn("demo", 0, 1).is_empty(), "the engine runs already");
    assert!(bed.give(Input::RespawnBudget { death: 1 }).is_empty(), "the new device brought a new budget");
    assert_eq!(bed.engine_died("demo"), ["respawn demo of 0 after death 2 and 2ms: a bug"]);
}

#[test]
fn a_budget_that_dies_on_a_lost_device_restarts() {
    let mut bed = serving();
    bed.give(Input::DeviceLost(lost()));
    bed.give(Input::BudgetDied { reason: text("a bug") });
    assert_eq!(bed.give(Input::RespawnBudget { death: 1 }), ["spawn a budget"]);
    assert!(bed.give(Input::RespawnBudget { death: 1 }).is_empty(), "a repeated input has no effect");
}

#[test]
fn a_budget_crash_loop_fails_the_runtime() {
    let mut bed = serving();
    for death in 1..=2 {
        bed.give(Input::BudgetDied { reason: text("a bug") });
        bed.give(Input::RespawnBudget { death });
    }
    assert_eq!(
        bed.give(Input::BudgetDied { reason: text("a bug") }),
        ["fail: the budget was restarted 2 times; the last failure: a bug"]
    );
}

#[test]
fn a_lost_device_without_a_successor_fails_the_runtime() {
    let mut unreplaced = bed(Rules { has_successor: false, ..rules() });
    assert_eq!(unreplaced.give(Input::DeviceLost(lost())), ["lose the device under [], replace: false"]);
    assert_eq!(unreplaced.give(Input::DeviceMade(Err(lost()))), [format!("fail: {}", lost())]);

    let mut again = bed(rules());
    again.give(Input::DeviceLost(lost()));
    again.give(Input::DeviceMade(Ok("another")));
    assert_eq!(
        again.give(Input::DeviceLost(lost())),
        ["lose the device under [], replace: false"],
        "devices were lost too often"
    );

    let mut later = bed(rules());
    later.give(Input::DeviceLost(lost()));
    later.give(Input::DeviceMade(Ok("another")));
    later.now = 11 * SECOND;
    assert_eq!(
        later.give(Input::DeviceLost(lost())),
        ["lose the device under [], replace: true"],
        "the earlier loss was long ago"
    );
}

#[test]
fn a_shutdown_ends_every_model_and_counts_interrupted_requests() {
    let mut bed = serving();
    bed.load("other");
    bed.load("earlier");
    bed.unload("earlier", "user");
    bed.due("earlier", 2);
    let closed = ["close demo of 0 within 1s", "close earlier of 2 within 1s", "close other of 1 within 1s"];
    assert_eq!(bed.shut_down("owner"), closed);
    assert_eq!(bed.load("late"), ["refuse late"]);
    assert_eq!(bed.due("demo", 0), ["end demo of 0: the runtime was shut down"]);
    bed.due("other", 1);
    assert_eq!(bed.ended("demo", 0, 1), ["demo is gone"]);
    assert_eq!(bed.ended("earlier", 2, 50), ["earlier is gone", "answer user: 50"]);
    assert_eq!(bed.ended("other", 1, 2), ["other is gone", "stop"]);
    let Shutdown { waiters, cut_off } = bed.core.take_shutdown().expect("a shutdown was requested");
    assert_eq!((waiters, cut_off), (vec!["owner"], 3));
}

#[test]
fn a_runtime_without_models_stops_at_once() {
    let mut bed = bed(rules());
    assert!(bed.give(Input::BudgetDied { reason: text("a bug") }).iter().all(|effect| effect != "stop"));
    assert_eq!(bed.shut_down("owner"), ["stop"]);
}

#[test]
fn a_device_loss_does_not_delay_a_shutdown() {
    let mut early = serving();
    early.shut_down("owner");
    assert_eq!(early.give(Input::DeviceLost(lost())), [r#"lose the device under ["demo"], replace: false"#]);
    assert!(early.give(Input::DeviceMade(Err(lost()))).is_empty());
    assert_eq!(early.due("demo", 0), ["end demo of 0: the runtime was shut down"]);
    assert_eq!(early.ended("demo", 0, 0), ["demo is gone", "stop"]);

    let mut late = serving();
    late.give(Input::DeviceLost(lost()));
    late.load("waiting");
    assert_eq!(late.shut_down("owner"), ["refuse waiting", "close demo of 0 within 1s"]);
    assert_eq!(late.give(Input::DeviceMade(Ok("another"))), ["take another", "respawn demo as 1"]);
}
