//! Tests of the ledger: granted and refused requests, revoked leases, and the order of these
//! effects.

use bursar_budgets::*;

fn ledger() -> Ledger {
    Ledger::new(LedgerConfig::new(Bytes(1000)))
}

fn request(name: &str, class: Class, bytes: u64) -> Request {
    Request::new(Owner::new(name, 0), class, "demo", Bytes(bytes))
}

fn ask(ledger: &mut Ledger, id: u64, request: Request, wait: bool) -> Vec<Effect> {
    ledger.step(Input::Ask { id: RequestId(id), request, wait })
}

fn granted(effects: &[Effect]) -> Vec<LeaseId> {
    let grants = effects.iter().filter_map(|effect| match effect {
        Effect::Granted(grant) => Some(grant.holding().id),
        _ => None,
    });
    grants.collect()
}

fn refusal(effects: &[Effect]) -> &Refusal {
    match effects {
        [Effect::Refused(refused)] => &refused.reason,
        other => panic!("expected one refusal, got {other:?}"),
    }
}

fn hold(ledger: &mut Ledger, id: u64, request: Request) -> LeaseId {
    granted(&ask(ledger, id, request, false))[0]
}

#[test]
fn a_request_beyond_free_memory_is_refused_with_the_shortfall() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("kv", Class::Kv, 700));
    let effects = ask(&mut ledger, 2, request("vision", Class::VisionCache, 400), false);
    let refused = refusal(&effects);
    assert_eq!(refused.to_string(), "400 B were requested, but only 300 B are available: 100 B short");
    assert_eq!(refused.hint().unwrap(), "ask for 100 B less, wait, or free that much elsewhere");
    let effects = ask(&mut ledger, 3, request("vision", Class::VisionCache, 1001), true);
    let expected = "1,001 B were requested, but a lease can get at most 1,000 B: 1 B short";
    assert_eq!(refusal(&effects).to_string(), expected);
}

#[test]
fn a_small_request_does_not_overtake_a_large_waiting_request() {
    let mut ledger = ledger();
    let held = hold(&mut ledger, 1, request("kv", Class::Kv, 700));
    let waits = ask(&mut ledger, 2, request("large", Class::external("t"), 500), true);
    assert_eq!(waits, [Effect::Waiting { request: RequestId(2), ahead: 0 }]);
    let small = ask(&mut ledger, 3, request("small", Class::external("t"), 10), false);
    assert_eq!(refusal(&small).to_string(), "10 B were requested, but 1 requests for memory are ahead in the queue");
    ask(&mut ledger, 4, request("small", Class::external("t"), 10), true);
    let urgent = ask(&mut ledger, 5, request("urgent", Class::Graphs, 10).priority(Priority::Startup), false);
    assert_eq!(granted(&urgent).len(), 1, "a request of higher priority overtakes");
    let freed = ledger.step(Input::Release { lease: held, passed: true });
    let order: Vec<_> = freed
        .iter()
        .filter_map(|e| match e {
            Effect::Granted(g) => Some(g.request().0),
            _ => None,
        })
        .collect();
    assert_eq!(order, [2, 4]);
}

#[test]
fn withdrawing_a_request_admits_the_next_one() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("kv", Class::Kv, 700));
    ask(&mut ledger, 2, request("a", Class::external("t"), 500), true);
    ask(&mut ledger, 3, request("b", Class::external("t"), 100), true);
    let effects = ledger.step(Input::Withdraw { id: RequestId(2) });
    assert!(
        matches!(&effects[..], [Effect::Refused(no), Effect::Granted(yes)]
        if no.reason == Refusal::Withdrawn && yes.request() == RequestId(3)),
        "{effects:?}"
    );
    assert!(ledger.step(Input::Withdraw { id: RequestId(3) }).is_empty(), "answered requests are not withdrawn");
}

#[test]
fn a_full_queue_refuses_requests_as_overloaded() {
    let mut ledger = Ledger::new(LedgerConfig { waiting_max: 1, ..LedgerConfig::new(Bytes(1000)) });
    hold(&mut ledger, 1, request("kv", Class::Kv, 1000));
    ask(&mut ledger, 2, request("a", Class::Kv, 1), true);
    let effects = ask(&mut ledger, 3, request("b", Class::Kv, 1), true);
    assert_eq!(refusal(&effects).to_string(), "1 requests are already waiting for memory; the limit is 1");
}

#[test]
fn a_dead_owner_is_cleared_once_after_all_its_fences() {
    let mut ledger = ledger();
    let before = ledger.snapshot();
    let one = hold(&mut ledger, 1, request("vision", Class::external("t"), 300));
    let other = hold(&mut ledger, 2, request("vision", Class::external("t"), 400));
    ask(&mut ledger, 3, request("vision", Class::external("t"), 900), true);
    let owner = Owner::new("vision", 0);
    let died = ledger.step(Input::OwnerDied { owner: owner.clone() });
    assert!(
        matches!(&died[..], [Effect::Refused(no), Effect::Revoking { lease: a }, Effect::Revoking { lease: b }]
        if no.reason.to_string() == "vision#0 is dead" && (*a, *b) == (one, other)),
        "{died:?}"
    );

    let next = Request { owner: owner.successor(), ..request("vision", Class::external("t"), 1) };
    let early = ask(&mut ledger, 4, next.clone(), true);
    assert_eq!(refusal(&early).to_string(), "vision#1 cannot start: its predecessors still hold 700 B");

    assert_eq!(ledger.step(Input::FencePassed { lease: one }), [Effect::Freed { lease: one, bytes: Bytes(300) }]);
    assert!(
        ledger.step(Input::Release { lease: other, passed: true }).is_empty(),
        "a late note does not skip the fence"
    );
    assert_eq!(
        ledger.step(Input::FencePassed { lease: other }),
        [Effect::Freed { lease: other, bytes: Bytes(400) }, Effect::OwnerCleared { owner: owner.clone() }]
    );
    assert!(ledger.step(Input::OwnerDied { owner }).is_empty());
    assert!(ledger.step(Input::FencePassed { lease: other }).is_empty());
    assert_eq!(ledger.snapshot(), before, "the ledger has returned to its initial state");
    assert_eq!(granted(&ask(&mut ledger, 5, next, false)).len(), 1);
    let late = ask(&mut ledger, 6, request("vision", Class::external("t"), 1), false);
    assert_eq!(refusal(&late), &Refusal::OwnerDead { owner: Owner::new("vision", 0) });
}

#[test]
fn an_owner_that_held_nothing_is_cleared_at_once() {
    let owner = Owner::new("chat", 7);
    let effects = ledger().step(Input::OwnerDied { owner: owner.clone() });
    assert_eq!(effects, [Effect::OwnerCleared { owner }]);
}

#[test]
fn foreign_growth_takes_canary_then_vision_cache_then_kv() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", Class::Kv, 500));
    let cache = hold(&mut ledger, 2, request("vision", Class::VisionCache, 200));
    hold(&mut ledger, 3, request("weights", Class::Weights, 100));
    assert_eq!(ledger.step(Input::Canary(Bytes(150))), [Effect::CanaryTaken { bytes: Bytes(150) }]);
    ledger.step(Input::Gate { model: "demo".into(), to: Gate::Frozen });
    assert_eq!(ledger.step(Input::Foreign(Bytes(100))), [Effect::CanaryGiven { bytes: Bytes(150) }]);

    let effects = ledger.step(Input::Foreign(Bytes(450)));
    let order = |lease, name, class, to| Effect::GiveUp { lease, owner: Owner::new(name, 0), class, to: Bytes(to) };
    assert_eq!(
        effects,
        [
            Effect::Deficit { short_by: Bytes(250), uncovered: Bytes(0) },
            order(cache, "vision", Class::VisionCache, 0),
            order(kv, "kv", Class::Kv, 450),
        ]
    );
    let shrink = |id, lease, to| Input::Resize { id: RequestId(id), lease, to: Bytes(to), wait: false, passed: true };
    ledger.step(shrink(4, cache, 0));
    let effects = ledger.step(shrink(5, kv, 450));
    assert!(effects.contains(&Effect::DeficitOver), "{effects:?}");
    let effects = ledger.step(Input::Foreign(Bytes(300)));
    assert_eq!(effects, [Effect::CanaryTaken { bytes: Bytes(150) }], "the canary comes back first");
    assert_eq!(ledger.snapshot().free, Bytes(0));
}

#[test]
fn shrink_orders_respect_floors_and_pass_the_rest_on() {
    let mut ledger = ledger();
    let older = hold(&mut ledger, 1, request("older", Class::Kv, 400));
    let younger = hold(&mut ledger, 2, request("younger", Class::Kv, 400));
    for (lease, to) in [(older, 300), (younger, 350), (LeaseId(99), 1)] {
        assert!(ledger.step(Input::Floor { lease, to: Bytes(to) }).is_empty());
    }
    let order = |lease, name, to| {
        let (owner, class) = (Owner::new(name, 0), Class::Kv);
        Effect::GiveUp { lease, owner, class, to: Bytes(to) }
    };
    let effects = ledger.step(Input::Foreign(Bytes(320)));
    let deficit = Effect::Deficit { short_by: Bytes(120), uncovered: Bytes(0) };
    assert_eq!(effects, [deficit, order(younger, "younger", 350), order(older, "older", 330)]);
    let effects = ledger.step(Input::Foreign(Bytes(400)));
    let deficit = Effect::Deficit { short_by: Bytes(200), uncovered: Bytes(50) };
    assert_eq!(
        effects,
        [deficit, order(younger, "younger", 350), order(older, "older", 300)],
        "no lease can free the other 50 bytes"
    );
}

#[test]
fn a_reminder_repeats_a_lost_shrink_order() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", Class::Kv, 900));
    assert!(ledger.step(Input::Remind { ahead: Bytes::ZERO }).is_empty(), "there is no deficit");
    let effects = ledger.step(Input::Foreign(Bytes(300)));
    assert_eq!(effects.len(), 2, "{effects:?}");
    assert!(ledger.step(Input::Foreign(Bytes(300))).is_empty(), "a deficit is announced once");
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes::ZERO }), effects);
    ledger.step(Input::Resize { id: RequestId(2), lease: kv, to: Bytes(800), wait: false, passed: true });
    let deficit = Effect::Deficit { short_by: Bytes(100), uncovered: Bytes(0) };
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes::ZERO })[0], deficit, "the rest of the deficit is announced");
}

#[test]
fn elastic_leases_shrink_to_restore_the_canary() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", Class::Kv, 700));
    ledger.step(Input::Canary(Bytes(200)));
    assert!(ledger.step(Input::Remind { ahead: Bytes::ZERO }).is_empty(), "the canary has its full size");
    // Another process can only take memory that is free: here 100 bytes and the canary.
    assert_eq!(ledger.step(Input::Foreign(Bytes(260))), [Effect::CanaryGiven { bytes: Bytes(200) }]);
    let order = |to| Effect::GiveUp { lease: kv, owner: Owner::new("kv", 0), class: Class::Kv, to: Bytes(to) };
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes::ZERO }), [order(540)]);
    let shrink = Input::Resize { id: RequestId(2), lease: kv, to: Bytes(540), wait: false, passed: true };
    assert!(ledger.step(shrink).contains(&Effect::CanaryTaken { bytes: Bytes(200) }));
    // When the other process takes more, the sum of all memory exceeds the total. The floor lets
    // the KV lease free 100 bytes. These cover the deficit of 50 first, so `uncovered` is 0.
    ledger.step(Input::Floor { lease: kv, to: Bytes(440) });
    ledger.step(Input::Foreign(Bytes(510)));
    let deficit = Effect::Deficit { short_by: Bytes(50), uncovered: Bytes(0) };
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes::ZERO }), [deficit, order(440)]);
}

#[test]
fn the_part_of_a_deficit_without_elastic_leases_is_reported() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("weights", Class::Weights, 900));
    let effects = ledger.step(Input::Foreign(Bytes(300)));
    assert_eq!(effects, [Effect::Deficit { short_by: Bytes(200), uncovered: Bytes(200) }]);
}

#[test]
fn foreign_memory_freed_during_a_models_start_is_ignored() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("weights", Class::Weights, 100));
    ledger.step(Input::Foreign(Bytes(300)));
    ledger.step(Input::Foreign(Bytes(200)));
    assert_eq!(ledger.snapshot().foreign, Bytes(300));
    ledger.step(Input::Gate { model: "demo".into(), to: Gate::Frozen });
    ledger.step(Input::Foreign(Bytes(200)));
    assert_eq!(ledger.snapshot().foreign, Bytes(200));
}

#[test]
fn a_frozen_gate_admits_only_tenants_elastic_growth_and_reservations() {
    let mut ledger = ledger();
    let graphs = hold(&mut ledger, 1, request("graph", Class::Graphs, 50));
    let kv = hold(&mut ledger, 2, request("kv", Class::Kv, 100));
    ledger.step(Input::Gate { model: "demo".into(), to: Gate::Frozen });

    let effects = ask(&mut ledger, 3, request("late", Class::StepWorkspace, 10), true);
    let expected = "the gate of demo is frozen: late#0 may hold 0 B of step workspace, but asked for 10 B in all";
    assert_eq!(refusal(&effects).to_string(), expected);
    hold(&mut ledger, 4, request("index", Class::external("index"), 10));
    hold(&mut ledger, 5, request("vision", Class::Host, 10));
    let grow = |id, lease, to| Input::Resize { id: RequestId(id), lease, to: Bytes(to), wait: false, passed: false };
    assert!(matches!(ledger.step(grow(6, kv, 200))[..], [Effect::Resized(_)]));
    let effects = ledger.step(grow(7, graphs, 51));
    assert!(matches!(refusal(&effects), Refusal::GateClosed { reserved: Bytes(50), asked: Bytes(51), .. }));

    ledger.step(Input::OwnerDied { owner: Owner::new("graph", 0) });
    ledger.step(Input::FencePassed { lease: graphs });
    let again = Request { owner: Owner::new("graph", 1), ..request("graph", Class::Graphs, 50) };
    assert_eq!(
        granted(&ask(&mut ledger, 8, again, false)).len(),
        1,
        "the successor gets the reservation of its predecessor"
    );
}

#[test]
fn a_gate_in_teardown_reopens_after_all_leases_are_released() {
    let mut ledger = ledger();
    let lease = hold(&mut ledger, 1, request("kv", Class::Kv, 1000));
    ask(&mut ledger, 2, request("kv", Class::Kv, 10), true);
    let gate = |to| Input::Gate { model: "demo".into(), to };
    let effects = ledger.step(gate(Gate::Teardown));
    assert!(matches!(&effects[..], [Effect::GateMoved { .. }, Effect::Refused(no)] if no.request == RequestId(2)));
    let [Effect::GateStuck(stuck)] = &ledger.step(gate(Gate::Open))[..] else { panic!() };
    assert_eq!(stuck.to_string(), "the gate of demo cannot reopen: the model still holds 1,000 B");
    ledger.step(Input::Release { lease, passed: true });
    assert!(matches!(ledger.step(gate(Gate::Open))[..], [Effect::GateMoved { .. }]));
}

#[test]
fn an_unloaded_model_does_not_count_as_being_profiled() {
    let mut ledger = ledger();
    let lease = hold(&mut ledger, 1, request("kv", Class::Kv, 100));
    let gate = |to| Input::Gate { model: "demo".into(), to };
    ledger.step(Input::Foreign(Bytes(300)));
    ledger.step(Input::Foreign(Bytes(50)));
    assert_eq!(ledger.available(Memory::Device), Bytes(600), "foreign decreases are ignored while the gate is open");
    ledger.step(gate(Gate::Teardown));
    ledger.step(Input::Release { lease, passed: true });
    ledger.step(gate(Gate::Open));
    ledger.step(Input::Foreign(Bytes(50)));
    assert_eq!(ledger.available(Memory::Device), Bytes(950));
}

#[test]
fn a_shrinking_leases_tail_is_free_only_after_its_fence() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", Class::Kv, 1000));
    let shrink = Input::Resize { id: RequestId(2), lease: kv, to: Bytes(600), wait: false, passed: false };
    assert!(ledger.step(shrink).is_empty());
    assert_eq!(ledger.available(Memory::Device), Bytes(0));
    ask(&mut ledger, 3, request("vision", Class::VisionCache, 300), true);
    let effects = ledger.step(Input::FencePassed { lease: kv });
    assert!(
        matches!(&effects[..], [Effect::Resized(resized), Effect::Granted(_)]
        if (resized.from(), resized.to()) == (Bytes(1000), Bytes(600))),
        "{effects:?}"
    );
}

#[test]
fn host_memory_has_its_own_total_and_queue() {
    let mut ledger = Ledger::new(LedgerConfig { host_total: Bytes(100), ..LedgerConfig::new(Bytes(1000)) });
    hold(&mut ledger, 1, request("kv", Class::Kv, 1000));
    ask(&mut ledger, 2, request("kv", Class::VisionCache, 1), true);
    hold(&mut ledger, 3, request("vision", Class::Host, 100));
    let effects = ask(&mut ledger, 4, request("vision", Class::Host, 1), false);
    assert!(matches!(refusal(&effects), Refusal::Short { short_by: Bytes(1), .. }));
}

#[test]
fn leases_of_the_canary_or_of_zero_bytes_are_refused() {
    let mut ledger = ledger();
    assert_eq!(refusal(&ask(&mut ledger, 1, request("x", Class::Canary, 1), false)), &Refusal::CanaryAsked);
    assert_eq!(refusal(&ask(&mut ledger, 2, request("x", Class::Kv, 0), false)), &Refusal::Nothing);
}

#[test]
fn a_rebuilt_ledger_is_equal_and_reuses_no_lease_numbers() {
    let mut ledger = ledger();
    let gone = hold(&mut ledger, 1, request("a", Class::Kv, 100));
    let kept = hold(&mut ledger, 2, request("b", Class::Weights, 200));
    ledger.step(Input::Release { lease: gone, passed: true });
    let live = ledger.holding(kept).cloned();
    let mut rebuilt = Ledger::rebuild(LedgerConfig::new(Bytes(1000)), live);
    assert_eq!(rebuilt.snapshot(), ledger.snapshot());
    assert!(hold(&mut rebuilt, 3, request("c", Class::Kv, 1)) > kept);
}

#[test]
fn the_ledger_prints_an_aligned_table() {
    let mut ledger = Ledger::new(LedgerConfig { overhead: Bytes::mib(8), ..LedgerConfig::new(Bytes::mib(512)) });
    for (id, name, class, bytes) in [
        (1, "weights", Class::Weights, Bytes(14_784_512)),
        (2, "kv", Class::Kv, Bytes::mib(128)),
        (3, "kv", Class::Kv, Bytes::mib(128)),
        (4, "vision", Class::VisionWorkspace, Bytes::mib(24)),
        (5, "vision", Class::Host, Bytes::mib(1)),
    ] {
        hold(&mut ledger, id, Request { bytes, ..request(name, class, 1) });
    }
    ledger.step(Input::Canary(Bytes::mib(32)));
    ask(&mut ledger, 6, Request { bytes: Bytes::mib(400), ..request("index", Class::external("index"), 1) }, true);
    let expected = "\
weights           demo  weights#0           14,784,512 B   14.1 MiB  █░░░░░░░░░░░░░░░░░░░░░░░
kv                demo  kv#0 x2            268,435,456 B  256.0 MiB  ████████████░░░░░░░░░░░░
vision workspace  demo  vision#0            25,165,824 B   24.0 MiB  █░░░░░░░░░░░░░░░░░░░░░░░
granted                                    308,385,792 B  294.1 MiB  ██████████████░░░░░░░░░░
overhead                driver, kernels      8,388,608 B    8.0 MiB  █░░░░░░░░░░░░░░░░░░░░░░░
foreign                 other processes              0 B        0 B  ░░░░░░░░░░░░░░░░░░░░░░░░
canary                  kept free           33,554,432 B   32.0 MiB  ██░░░░░░░░░░░░░░░░░░░░░░
free                                       186,542,080 B  177.9 MiB  ████████░░░░░░░░░░░░░░░░
total                                      536,870,912 B  512.0 MiB  ████████████████████████
host              demo  vision#0             1,048,576 B    1.0 MiB  █░░░░░░░░░░░░░░░░░░░░░░░
host total                               1,073,741,824 B    1.0 GiB  ████████████████████████
waiting: request 6 for 419,430,400 B (tenant)
";
    let text = ledger.snapshot().to_string();
    assert_eq!(text, expected, "\n{text}");
}

#[test]
fn a_snapshot_is_plain_json() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("index", Class::external("mine"), 10));
    let json = serde_json::to_value(ledger.snapshot()).unwrap();
    assert_eq!(json["total"], 1000);
    let expected = serde_json::json!({
        "id": 1, "class": "tenant:mine", "owner": {"name": "index", "generation": 0},
        "model": "demo", "bytes": 10, "state": "held",
    });
    assert_eq!(json["leases"][0], expected);
}

#[test]
fn a_plan_prints_its_claims_and_suggests_knobs_that_fit() {
    let plan = MemoryPlan::new().claim(Class::Weights, "demo", Bytes(7_168_000), "3.6 M parameters x 2 B").claim(
        Class::StepWorkspace,
        "prefill of 512 tokens",
        Bytes::mib(21),
        "dry run",
    );
    let expected = "\
weights         demo                    7,168,000 B   6.8 MiB  3.6 M parameters x 2 B
step workspace  prefill of 512 tokens  22,020,096 B  21.0 MiB  dry run
total                                  29,188,096 B  27.8 MiB
";
    assert_eq!(plan.to_string(), expected, "\n{plan}");
    assert!(plan.fits(plan.total(), || unreachable!()).is_ok());
    let knobs = || vec![Knob::new("step_tokens", 512, 384), Knob::hopeless("kv_tokens", 1024)];
    let error = plan.fits(Bytes::mib(24), knobs).unwrap_err();
    let expected = "the plan needs 29,188,096 B (27.8 MiB), but only 25,165,824 B (24.0 MiB) are available: \
                    4,022,272 B (3.8 MiB) short";
    assert_eq!(error.to_string(), expected);
    let expected = "set `step_tokens` to 384 instead of 512; changing only `kv_tokens` is not enough";
    assert_eq!(error.hint().unwrap(), expected);
}

#[test]
fn a_released_lease_is_not_revoked_when_its_owner_dies() {
    let mut ledger = ledger();
    let lease = hold(&mut ledger, 1, request("vision", Class::VisionCache, 300));
    assert!(ledger.step(Input::Release { lease, passed: false }).is_empty());
    assert!(ledger.step(Input::OwnerDied { owner: Owner::new("vision", 0) }).is_empty(), "a fence is already awaited");
    let effects = ledger.step(Input::FencePassed { lease });
    assert!(matches!(effects[..], [Effect::Freed { .. }, Effect::OwnerCleared { .. }]), "{effects:?}");
}

#[test]
fn bytes_that_are_being_freed_are_not_ordered_again() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", Class::Kv, 600));
    let cache = hold(&mut ledger, 2, request("vision", Class::VisionCache, 400));
    let shrink = Input::Resize { id: RequestId(3), lease: kv, to: Bytes(500), wait: false, passed: false };
    assert!(ledger.step(shrink).is_empty());
    let effects = ledger.step(Input::Foreign(Bytes(250)));
    let order = Effect::GiveUp {
        lease: cache,
        owner: Owner::new("vision", 0),
        class: Class::VisionCache,
        to: Bytes(250), // 250 are missing: the shrinking `kv` frees 100, so the cache must free 150
    };
    assert_eq!(effects, [Effect::Deficit { short_by: Bytes(250), uncovered: Bytes(0) }, order]);
}

#[test]
fn a_newer_resize_replaces_the_waiting_resize_of_a_lease() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", Class::Kv, 600));
    hold(&mut ledger, 2, request("vision", Class::VisionCache, 400));
    let grow = |id, to| Input::Resize { id: RequestId(id), lease: kv, to: Bytes(to), wait: true, passed: false };
    assert!(matches!(ledger.step(grow(3, 700))[..], [Effect::Waiting { .. }]));
    let effects = ledger.step(grow(4, 650));
    assert!(
        matches!(&effects[..], [Effect::Refused(no), Effect::Waiting { request, .. }]
            if no.request == RequestId(3) && no.reason == Refusal::Withdrawn && *request == RequestId(4)),
        "{effects:?}"
    );
    let effects = ledger.step(Input::Release { lease: kv, passed: true });
    assert!(matches!(&effects[..], [Effect::Refused(no), Effect::Freed { .. }]
        if no.reason == Refusal::NotHeld { lease: kv }));
}

#[test]
fn only_one_of_two_waiting_requests_gets_a_reservation() {
    let mut ledger = ledger();
    let graphs = hold(&mut ledger, 1, request("graph", Class::Graphs, 50));
    ledger.step(Input::Gate { model: "demo".into(), to: Gate::Frozen });
    ledger.step(Input::Release { lease: graphs, passed: true });
    let tenant = hold(&mut ledger, 2, request("index", Class::external("index"), 1000));
    ask(&mut ledger, 3, request("graph", Class::Graphs, 50), true);
    ask(&mut ledger, 4, request("graph", Class::Graphs, 50), true);
    let effects = ledger.step(Input::Release { lease: tenant, passed: true });
    assert!(
        matches!(&effects[1..], [Effect::Granted(yes), Effect::Refused(no)]
            if yes.request() == RequestId(3) && matches!(no.reason, Refusal::GateClosed { .. })),
        "{effects:?}"
    );
}
