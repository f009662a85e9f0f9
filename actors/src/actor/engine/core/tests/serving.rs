//! Tests of serving: deaths, refused memory, and resizes of the KV cache.

use super::*;

#[test]
fn a_schedulers_death_does_not_restart_the_vision_actor() {
    let mut bed = Bed::serving(rules());
    let described = ["check device", "starting", "scheduler restarts", "stop scheduler", "restart 1 after 1ms"];
    assert_eq!(bed.die(1).recorded(), described);
    let kept =
        bed.core.serving().expect("the serving state is kept").children().expect("the vision role keeps running");
    assert_eq!(kept.0, ["vision"]);
    let described = ["start 2 from scheduler with 100 of 100, owned by 0", "admit requests to 2"];
    assert_eq!(bed.give(Input::Restart { restart: 1 }).recorded(), described, "READY is not announced again");
    assert_eq!(bed.give(Input::Restart { restart: 1 }).recorded(), [""; 0], "the restart was handled already");
}

#[test]
fn a_pending_restart_is_ignored_after_another_death() {
    let mut bed = Bed::serving(rules());
    bed.die(1).recorded();
    let described = ["check device", "starting", "vision restarts", "stop vision", "restart 2 after 2ms"];
    assert_eq!(bed.die(0).recorded(), described);
    assert_eq!(bed.give(Input::Restart { restart: 1 }).recorded(), [""; 0]);
    let described = ["start 2 from vision with 100 of 100, owned by 0", "admit requests to 2"];
    assert_eq!(bed.give(Input::Restart { restart: 2 }).recorded(), described);
}

#[test]
fn a_crash_loop_ends_the_engine_with_its_reason() {
    let mut bed = Bed::serving(rules());
    for restart in 1..=3 {
        bed.die(1).give(Input::Restart { restart });
    }
    bed.recorded();
    let described = ["check device", "starting", "give up: 3 restarts within 60 s; the last failure: a bug"];
    assert_eq!(bed.die(1).recorded(), described);
    assert_eq!(bed.die(0).give(Input::Restart { restart: 3 }).recorded(), [""; 0]);
}

#[test]
fn serving_restarts_with_a_smaller_kv_cache_after_refused_memory() {
    let mut bed = Bed::serving(rules());
    let described = [
        "check device",
        "starting",
        "stop scheduler, vision",
        "attempt 1 refused in serve of 1600",
        "from 100 to 95",
        "Shrink { to: 95 }",
    ];
    assert_eq!(bed.refuse_serving(WhichLane::Step, 1).recorded(), described);
    assert_eq!(bed.give(Input::Pool(PoolInput::MayGrow(100))).recorded(), [""; 0], "the pool is shrinking");
    let described = [
        "accept resize orders from 16 to 95",
        "start 2 from vision with 95 of 95, owned by 0",
        "attempt 2 ready in serve of 1520",
        "ready",
        "admit requests to 2",
    ];
    assert_eq!(bed.changed().recorded(), described);
    let reports: Vec<_> = bed.core.log.reports().iter().map(|report| &report.outcome).collect();
    assert!(
        matches!(reports[..], [Outcome::Refused { .. }, Outcome::Ready]),
        "each attempt has one report: {reports:?}"
    );
}

#[test]
fn a_pinned_kv_size_serves_again_at_once_without_shrinking() {
    let mut bed = Bed::serving(Rules { is_pinned: true, ..rules() });
    let described = bed.refuse_serving(WhichLane::Vision, 1).recorded();
    assert_eq!(
        described[4..6],
        ["accept resize orders from 16 to 100", "start 2 from vision with 100 of 100, owned by 0"]
    );
}

#[test]
fn refusals_of_stopped_or_replaced_actors_are_ignored() {
    let mut bed = Bed::serving(rules());
    bed.die(1).recorded();
    assert_eq!(bed.refuse_serving(WhichLane::Step, 1).recorded(), [""; 0], "the actor has stopped");
    bed.give(Input::Restart { restart: 1 }).recorded();
    assert_eq!(bed.refuse_serving(WhichLane::Step, 1).recorded(), [""; 0], "a successor serves already");
    // The vision actor outlived the restart, so it still belongs to the first start.
    assert_eq!(bed.refuse_serving(WhichLane::Vision, 2).recorded(), [""; 0]);
    assert_eq!(bed.refuse_serving(WhichLane::Vision, 1).recorded()[2], "stop scheduler, vision");
    assert_eq!(bed.refuse_serving(WhichLane::Vision, 1).recorded(), [""; 0], "the refusal is being handled already");
}

#[test]
fn a_refusal_replaces_a_pending_restart_by_a_full_restart() {
    let mut bed = Bed::serving(rules());
    bed.die(1).recorded();
    assert_eq!(bed.refuse_serving(WhichLane::Vision, 1).recorded()[2], "stop vision");
    assert_eq!(bed.give(Input::Restart { restart: 1 }).recorded(), [""; 0]);
    assert_eq!(bed.changed().recorded()[1], "start 2 from vision with 95 of 95, owned by 0");
}

#[test]
fn the_last_refusal_while_serving_asks_for_advice_and_ends() {
    let mut bed = Bed::serving(rules());
    for generation in 1..=3 {
        bed.refuse_serving(WhichLane::Step, generation).changed();
    }
    bed.recorded();
    let described = bed.refuse_serving(WhichLane::Step, 4).recorded();
    assert_eq!(described[3..], ["attempt 4 refused in serve of 1360", "advise on plan: 60 B missing for 1360"]);
    let serving = bed.core.serving().expect("leases are kept until the engine ends");
    assert!(serving.children().is_none() && *serving.profiled() == "sized");
    assert_eq!(bed.give(Input::Pool(PoolInput::GiveUp(50))).recorded(), [""; 0], "no scheduler is serving");
    assert_eq!(bed.give(Input::Advised(Vec::new())).recorded().len(), 1);
    assert!(bed.core.serving().is_none());
}

#[test]
fn a_fault_plan_refuses_one_step_of_each_attempt() {
    let faults = FaultPlan::none().refuse(At::Serve, 2);
    let mut bed = Bed::sizing(Rules { faults, ..rules() }, false);
    let drills = |described: Vec<String>| described.iter().filter(|effect| effect.ends_with("refusing a step")).count();
    assert_eq!(drills(bed.sized(0).recorded()), 1);
    assert_eq!(
        drills(bed.die(1).give(Input::Restart { restart: 1 }).recorded()),
        0,
        "the plan refuses one step per attempt"
    );
    assert_eq!(drills(bed.refuse_serving(WhichLane::Step, 2).changed().recorded()), 1);
    assert_eq!(
        drills(bed.refuse_serving(WhichLane::Step, 3).changed().recorded()),
        0,
        "the plan names only two attempts"
    );
}

#[test]
fn shrink_and_growth_orders_resize_the_pool_of_the_scheduler() {
    let mut bed = Bed::serving(rules());
    assert_eq!(bed.give(Input::Pool(PoolInput::GiveUp(60))).recorded(), ["from 100 to 60", "Shrink { to: 60 }"]);
    assert_eq!(bed.changed().recorded(), [""; 0]);
    assert_eq!(bed.give(Input::Pool(PoolInput::MayGrow(80))).recorded(), ["Grow { from: 60, to: 80 }"]);
    assert_eq!(bed.changed().recorded(), ["from 60 to 80", "scheduler may use 80"]);
    bed.die(1).recorded();
    assert_eq!(
        bed.give(Input::Restart { restart: 1 }).recorded()[0],
        "start 2 from scheduler with 80 of 100, owned by 0"
    );
}

#[test]
fn a_shrink_order_without_a_scheduler_waits_for_its_restart() {
    let mut bed = Bed::serving(rules());
    bed.die(1).recorded();
    assert_eq!(bed.give(Input::Pool(PoolInput::GiveUp(60))).recorded(), [""; 0]);
    let described = bed.give(Input::Restart { restart: 1 }).recorded();
    assert_eq!(described[1..], ["admit requests to 2", "from 100 to 60", "Shrink { to: 60 }"]);
}
