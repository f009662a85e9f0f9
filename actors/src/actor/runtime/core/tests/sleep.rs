//! Scenarios of models that sleep, free memory for other models, and wake up.

use super::*;
use crate::{
    metric::WakeReason,
    sleep::{SleepError, SleepLevel},
};

pub(super) fn described(effect: &Effect<Names>) -> String {
    match effect {
        Effect::BeginSleep { name, within, stayed_busy: 0, .. } => format!("{name} falls asleep within {within:?}"),
        Effect::BeginSleep { name, stayed_busy, .. } => format!("{name} falls asleep after {stayed_busy} times"),
        Effect::ReleaseEngine { name, .. } => format!("{name} frees GPU"),
        Effect::StayAwake { name } => format!("{name} stays awake"),
        Effect::ShowAsleep { name, level, reason } => format!("{name} sleeps at {level} for {reason:?}"),
        Effect::ShowWaking { name } => format!("{name} is waking"),
        Effect::Wake { name, generation, .. } => format!("start {name} as {generation}"),
        Effect::ShowAwake { name, reason, took } => format!("{name} is awake for {reason:?} after {took:?}"),
        Effect::ReportNotWoken { name } => format!("{name} did not wake up"),
        Effect::FailStart { name } => format!("{name} did not start"),
        Effect::ReportIdle => text("poll"),
        Effect::ReportIdleLater { busy, within } => format!("poll when any of {busy:?} is idle, or after {within:?}"),
        Effect::AnswerSleeper { sleeper, outcome } => format!("answer {sleeper}: {}", outcome.is_ok()),
        _ => unreachable!("the remaining effects are formatted by the other tests"),
    }
}

impl Bed {
    fn sleep(&mut self, name: &str, load: u64, sleeper: &'static str) -> Vec<String> {
        self.sleep_at(SleepLevel::Level1, name, load, sleeper)
    }

    fn sleep_at(&mut self, level: SleepLevel, name: &str, load: u64, sleeper: &'static str) -> Vec<String> {
        self.give(Input::Sleep { name: text(name), load, level, within: SECOND, sleeper })
    }

    fn wake(&mut self, name: &str, load: u64) -> Vec<String> {
        self.give(Input::Wake { name: text(name), load, reason: WakeReason::Request })
    }

    fn drained(&mut self, name: &str, load: u64) -> Vec<String> {
        self.give(Input::Drained { name: text(name), load, drained: Ok(()) })
    }

    fn stayed_busy(&mut self, name: &str, load: u64) -> Vec<String> {
        let drained = Err(SleepError::Busy { running: 1, within: SECOND });
        self.give(Input::Drained { name: text(name), load, drained })
    }

    fn fell_asleep(&mut self, name: &str, load: u64) -> Vec<String> {
        self.give(Input::FellAsleep { name: text(name), load, level: SleepLevel::Level1 })
    }

    fn woken(&mut self, name: &str, load: u64) -> Vec<String> {
        self.give(Input::Woken { name: text(name), load })
    }

    fn not_woken(&mut self, name: &str, may_fit: bool) -> Vec<String> {
        self.give(Input::NotWoken { name: text(name), may_fit })
    }

    /// Reports for how many seconds each model has been idle. `None` means that the model has
    /// requests, which wait if the model sleeps.
    fn check_idle(&mut self, seen: &[(&str, Option<u64>)]) -> Vec<String> {
        let seen = seen.iter().map(|(name, idle_for)| IdleReport {
            name: text(name),
            idle_for: idle_for.map(Duration::from_secs),
            is_awaited: idle_for.is_none(),
        });
        self.give(Input::IdleReports(seen.collect()))
    }
}

/// The models "demo" (load 0) and "other" (load 1) on a device with memory for one of them. "other"
/// is awake.
fn in_turn() -> Bed {
    let mut bed = bed(Rules { turn: Some(5 * SECOND), ..rules() });
    bed.load("demo");
    bed.woken("demo", 0);
    bed.load("other");
    assert_eq!(bed.not_woken("other", true), ["other frees GPU"]);
    assert_eq!(bed.fell_asleep("other", 1), ["other is waking", "poll"]);
    assert_eq!(bed.check_idle(&[("demo", Some(1)), ("other", None)]), ["demo falls asleep within None"]);
    assert_eq!(bed.drained("demo", 0), ["demo frees GPU"]);
    assert_eq!(bed.fell_asleep("demo", 0), ["demo sleeps at 1 for Some(FreeMemory)", "start other as 2"]);
    assert_eq!(bed.woken("other", 1), ["other is awake for None after 0ns"]);
    bed
}

#[test]
fn a_model_sleeps_after_draining_and_wakes_for_a_request() {
    let mut bed = serving();
    assert_eq!(bed.woken("demo", 0), ["demo is awake for None after 0ns"]);
    assert_eq!(bed.sleep("demo", 0, "first"), ["demo falls asleep within Some(1s)"]);
    assert!(bed.sleep("demo", 0, "second").is_empty(), "the change is already under way");
    assert_eq!(bed.drained("demo", 0), ["demo frees GPU"]);
    assert!(bed.engine_died("demo").is_empty(), "the engine was stopped for the sleep");
    let asleep = ["demo sleeps at 1 for Some(Call)", "answer first: true", "answer second: true"];
    assert_eq!(bed.fell_asleep("demo", 0), asleep);
    assert_eq!(bed.sleep("demo", 0, "third"), ["answer third: true"]);
    assert_eq!(bed.wake("demo", 0), ["demo is waking", "start demo as 1"]);
    assert!(bed.wake("demo", 0).is_empty(), "the change is already under way");
    bed.now += SECOND;
    assert_eq!(bed.woken("demo", 0), ["demo is awake for Some(Request) after 1s"]);
    assert!(bed.wake("demo", 0).is_empty(), "the model is awake");
    assert_eq!(bed.sleep("demo", 7, "late"), ["answer late: false"], "the request is for a previous load");
}

#[test]
fn a_model_whose_requests_run_too_long_stays_awake() {
    let mut bed = serving();
    bed.woken("demo", 0);
    bed.sleep("demo", 0, "user");
    bed.wake("demo", 0);
    assert_eq!(bed.stayed_busy("demo", 0), ["demo stays awake", "answer user: false"]);
    assert!(bed.drained("demo", 0).is_empty(), "a late drain report is ignored");
}

#[test]
fn a_deeper_sleep_requested_while_falling_asleep_is_carried_out() {
    let mut bed = serving();
    bed.woken("demo", 0);
    bed.sleep("demo", 0, "first");
    assert!(
        bed.sleep_at(SleepLevel::Level2, "demo", 0, "second").is_empty(),
        "the model falls asleep before it sleeps deeper"
    );
    bed.drained("demo", 0);
    assert_eq!(bed.fell_asleep("demo", 0), ["demo frees GPU"], "the weights are released as well");
    let effects = bed.give(Input::FellAsleep { name: text("demo"), load: 0, level: SleepLevel::Level2 });
    assert_eq!(effects, ["demo sleeps at 2 for Some(Call)", "answer first: true", "answer second: true"]);
}

#[test]
fn a_request_during_falling_asleep_wakes_the_model_afterwards() {
    let mut bed = serving();
    bed.woken("demo", 0);
    bed.sleep("demo", 0, "user");
    assert!(bed.wake("demo", 0).is_empty(), "the model falls asleep before it wakes up");
    bed.drained("demo", 0);
    assert!(bed.wake("demo", 0).is_empty());
    let effects = bed.fell_asleep("demo", 0);
    let expected = ["demo sleeps at 1 for Some(Call)", "answer user: true", "demo is waking", "start demo as 1"];
    assert_eq!(effects, expected);
    assert!(bed.sleep("demo", 0, "again").is_empty(), "the model wakes up before it sleeps again");
    let effects = bed.woken("demo", 0);
    assert_eq!(effects, ["demo is awake for Some(Request) after 0ns", "demo falls asleep within Some(1s)"]);
}

#[test]
fn a_failed_wake_is_reported_and_the_model_stays_asleep() {
    let mut bed = serving();
    bed.woken("demo", 0);
    bed.sleep("demo", 0, "user");
    bed.drained("demo", 0);
    bed.fell_asleep("demo", 0);
    bed.wake("demo", 0);
    assert_eq!(bed.not_woken("demo", true), ["demo did not wake up", "demo frees GPU"], "no other model frees memory");
    assert_eq!(bed.fell_asleep("demo", 0), ["demo sleeps at 1 for None"]);
    assert_eq!(bed.wake("demo", 0), ["demo is waking", "start demo as 2"]);
    // An engine that dies during a wake is replaced, as during a load.
    assert_eq!(bed.engine_died("demo"), ["respawn demo of 0 after death 1 and 1ms: a bug"]);
    assert_eq!(bed.respawn("demo", 0, 1), ["respawn demo as 3"]);
    assert_eq!(bed.woken("demo", 0), ["demo is awake for Some(Request) after 0ns"]);
}

#[test]
fn an_unload_during_a_suspend_ends_the_model_afterwards() {
    let mut bed = serving();
    bed.woken("demo", 0);
    bed.sleep("demo", 0, "sleeper");
    bed.drained("demo", 0);
    bed.unload("demo", "user");
    assert!(bed.due("demo", 0).is_empty(), "the weights are being moved");
    assert_eq!(bed.fell_asleep("demo", 0), ["answer sleeper: true", "end demo of 0: it was unloaded"]);
    assert_eq!(bed.ended("demo", 0, 0), ["demo is gone", "answer user: 0"]);
    let mut early = serving();
    early.woken("demo", 0);
    early.sleep("demo", 0, "sleeper");
    early.unload("demo", "user");
    assert_eq!(early.due("demo", 0), ["end demo of 0: it was unloaded", "answer sleeper: false"]);
    assert!(early.drained("demo", 0).is_empty(), "the engine is ending");
}

#[test]
fn an_idle_model_falls_asleep_only_after_its_idle_time() {
    let mut bed = serving();
    assert!(bed.check_idle(&[("demo", Some(90))]).is_empty(), "the engine has not started");
    bed.woken("demo", 0);
    assert!(bed.check_idle(&[("demo", Some(59))]).is_empty());
    assert!(bed.check_idle(&[("demo", None)]).is_empty());
    assert_eq!(bed.check_idle(&[("demo", Some(60))]), ["demo falls asleep within None"]);
}

#[test]
fn a_wake_without_memory_suspends_the_least_recently_used_model() {
    let mut bed = in_turn();
    bed.load("third");
    bed.woken("third", 3);
    assert_eq!(bed.wake("demo", 0), ["demo is waking", "start demo as 4"], "there may be enough memory");
    bed.not_woken("demo", true);
    assert_eq!(bed.fell_asleep("demo", 0), ["demo is waking", "poll"]);
    let seen = [("demo", None), ("other", Some(2)), ("third", Some(3))];
    assert_eq!(bed.check_idle(&seen), ["third falls asleep within None"]);
    assert!(bed.check_idle(&seen).is_empty(), "only one model falls asleep at a time");
}

#[test]
fn an_endless_reply_does_not_block_models_waiting_for_memory() {
    let mut bed = in_turn();
    bed.load("third");
    bed.woken("third", 3);
    bed.wake("demo", 0);
    bed.not_woken("demo", true);
    bed.fell_asleep("demo", 0);
    bed.now += 5 * SECOND;
    let busy = [("demo", None), ("other", None), ("third", None)];
    assert_eq!(bed.check_idle(&busy), ["other falls asleep within None"]);
    bed.sleep("other", 1, "user");
    let effects = bed.stayed_busy("other", 1);
    assert_eq!(
        effects,
        ["other stays awake", "other falls asleep within Some(1s)"],
        "the user allowed another drain time"
    );
    assert_eq!(bed.stayed_busy("other", 1), ["other stays awake", "answer user: false", "poll"]);
    assert_eq!(bed.check_idle(&busy), ["third falls asleep within None"]);
    assert_eq!(bed.stayed_busy("third", 3), ["third stays awake", "poll"]);
    assert_eq!(bed.check_idle(&busy), [r#"poll when any of ["other", "third"] is idle, or after 5s"#]);
    bed.now += 5 * SECOND;
    assert_eq!(
        bed.check_idle(&busy),
        ["other falls asleep after 1 times"],
        "the other model has served for a whole turn"
    );
    bed.drained("other", 1);
    assert_eq!(bed.fell_asleep("other", 1), ["other sleeps at 1 for Some(FreeMemory)", "start demo as 5"]);
}

#[test]
fn a_sleep_request_to_a_waking_model_is_delayed() {
    let mut bed = in_turn();
    bed.wake("demo", 0);
    assert_eq!(bed.not_woken("demo", true), ["demo frees GPU"]);
    assert!(bed.sleep("demo", 0, "user").is_empty());
    assert_eq!(bed.fell_asleep("demo", 0), ["demo is waking", "poll"]);
    bed.check_idle(&[("demo", None), ("other", Some(1))]);
    bed.drained("other", 1);
    bed.fell_asleep("other", 1);
    let effects = bed.woken("demo", 0);
    assert_eq!(effects, ["demo is awake for Some(Request) after 0ns", "demo falls asleep within Some(1s)"]);
    bed.drained("demo", 0);
    assert_eq!(bed.fell_asleep("demo", 0), ["demo sleeps at 1 for Some(Call)", "answer user: true"]);
}

#[test]
fn busy_models_take_turns_of_a_minimum_length() {
    let mut bed = in_turn();
    bed.wake("demo", 0);
    bed.not_woken("demo", true);
    bed.fell_asleep("demo", 0);
    let busy = [("demo", None), ("other", None)];
    assert_eq!(bed.check_idle(&busy), [r#"poll when any of ["other"] is idle, or after 5s"#]);
    bed.now += 5 * SECOND;
    assert_eq!(bed.check_idle(&busy), ["other falls asleep within None"]);
    assert!(bed.wake("other", 1).is_empty(), "a request for the other model came meanwhile");
    bed.drained("other", 1);
    let effects = bed.fell_asleep("other", 1);
    assert_eq!(
        effects,
        ["other sleeps at 1 for Some(FreeMemory)", "other is waking", "start demo as 4"],
        "the model that waited longer wakes first"
    );
    let effects = bed.woken("demo", 0);
    assert_eq!(effects, ["demo is awake for Some(Request) after 5s", "start other as 5"]);
    bed.not_woken("other", true);
    bed.fell_asleep("other", 1);
    assert_eq!(
        bed.check_idle(&busy),
        [r#"poll when any of ["demo"] is idle, or after 5s"#],
        "the model that just woke keeps its turn"
    );
}

#[test]
fn a_wake_fails_if_no_model_can_free_memory() {
    let mut bed = in_turn();
    bed.wake("demo", 0);
    assert_eq!(
        bed.not_woken("demo", false),
        ["demo did not wake up", "demo frees GPU"],
        "the model would not fit even on an empty device"
    );
    bed.fell_asleep("demo", 0);
    bed.wake("demo", 0);
    bed.not_woken("demo", true);
    bed.fell_asleep("demo", 0);
    assert_eq!(
        bed.check_idle(&[("demo", Some(0)), ("other", None)]),
        ["demo frees GPU"],
        "no caller waits for the model"
    );
    assert_eq!(bed.fell_asleep("demo", 0), ["demo sleeps at 1 for None"]);
    bed.wake("demo", 0);
    bed.not_woken("demo", true);
    bed.unload("other", "user");
    bed.due("other", 1);
    bed.fell_asleep("demo", 0);
    assert_eq!(
        bed.ended("other", 1, 0),
        ["other is gone", "answer user: 0", "start demo as 6"],
        "there is enough memory now"
    );
    let mut alone = self::bed(Rules { turn: Some(SECOND), ..rules() });
    alone.load("demo");
    alone.not_woken("demo", true);
    alone.fell_asleep("demo", 0);
    assert_eq!(alone.check_idle(&[("demo", None)]), ["demo did not start", "end demo of 0: it did not start"]);
}

#[test]
fn sleeping_and_waking_models_move_to_the_next_device() {
    let mut bed = serving();
    bed.woken("demo", 0);
    bed.sleep("demo", 0, "user");
    bed.drained("demo", 0);
    bed.fell_asleep("demo", 0);
    bed.give(Input::DeviceLost(lost()));
    assert_eq!(bed.wake("demo", 0), ["demo is waking"], "the model waits for a device");
    assert_eq!(bed.give(Input::DeviceMade(Ok("another"))), ["take another", "start demo as 1"]);
    bed.give(Input::DeviceLost(lost()));
    assert!(bed.core.lost.is_some());
}
