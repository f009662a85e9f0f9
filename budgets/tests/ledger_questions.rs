//! Queries of the ledger, and the limits of its grants.

use bursar_budgets::testing::HostControl;
use bursar_budgets::*;

fn ledger() -> Ledger {
    Ledger::new(LedgerConfig::new(Bytes(1000)))
}

fn request(name: &str, generation: u64, class: Class, model: &str, bytes: u64) -> Request {
    Request::new(Owner::new(name, generation), class, model, Bytes(bytes))
}

fn ask(ledger: &mut Ledger, id: u64, request: Request, wait: bool) -> Vec<Effect> {
    ledger.step(Input::Ask { id: RequestId(id), request, wait })
}

#[track_caller]
fn hold(ledger: &mut Ledger, id: u64, request: Request) -> LeaseId {
    match &ask(ledger, id, request, false)[..] {
        [Effect::Granted(grant)] => grant.holding().id,
        other => panic!("expected a grant, got {other:?}"),
    }
}

fn resize(ledger: &mut Ledger, id: u64, lease: LeaseId, to: u64, passed: bool) -> Vec<Effect> {
    ledger.step(Input::Resize { id: RequestId(id), lease, to: Bytes(to), wait: true, passed })
}

fn gate(ledger: &mut Ledger, model: &str, to: Gate) -> Vec<Effect> {
    ledger.step(Input::Gate { model: model.into(), to })
}

#[track_caller]
fn refusal(effects: Vec<Effect>) -> Refusal {
    match <[Effect; 1]>::try_from(effects) {
        Ok([Effect::Refused(refused)]) => refused.reason,
        other => panic!("expected one refusal, got {other:?}"),
    }
}

#[test]
fn a_ledger_starts_from_what_its_device_reports() {
    let config = HostConfig { overhead: Bytes::mib(3), ..HostConfig::small(Bytes::mib(8)) };
    let device = HostDevice::new(config).unwrap();
    let expected = LedgerConfig { overhead: Bytes::mib(3), ..LedgerConfig::new(Bytes::mib(8)) };
    assert_eq!(LedgerConfig::of(&device), expected);
    assert_eq!((expected.host_total, expected.waiting_max), (Bytes::gib(1), 256));
    device.lose("a script says so");
    assert_eq!(LedgerConfig::of(&device).total, Bytes::ZERO);
}

#[test]
fn a_dead_owner_is_cleared_when_it_holds_nothing() {
    let mut ledger = ledger();
    let owner = Owner::new("kv", 1);
    assert!(!ledger.is_cleared(&owner), "the owner is alive");
    let lease = hold(&mut ledger, 1, request("kv", 1, Class::Kv, "demo", 100));
    ledger.step(Input::OwnerDied { owner: owner.clone() });
    assert!(!ledger.is_cleared(&owner), "100 bytes are still held");
    ledger.step(Input::FencePassed { lease });
    assert!(ledger.is_cleared(&owner) && ledger.is_cleared(&owner.first()));
    assert!(!ledger.is_cleared(&owner.successor()), "the successor may start");
}

#[test]
fn the_ledger_reports_the_gate_of_a_model() {
    let mut ledger = ledger();
    assert_eq!(ledger.gate("demo"), Gate::Open, "the gate is new");
    gate(&mut ledger, "demo", Gate::Frozen);
    assert_eq!(ledger.gate("demo"), Gate::Frozen);
    gate(&mut ledger, "demo", Gate::Teardown);
    assert_eq!(ledger.gate("demo"), Gate::Teardown);
    assert_eq!(ledger.snapshot().gates, [GateLine { model: "demo".into(), gate: Gate::Teardown }]);
    gate(&mut ledger, "demo", Gate::Open);
    assert_eq!(ledger.gate("demo"), Gate::Open);
    assert!(ledger.snapshot().gates.is_empty(), "an open gate of a model without leases is not listed");
}

#[test]
fn models_that_are_being_sized_are_counted() {
    let mut ledger = ledger();
    assert_eq!((ledger.profiling(), ledger.is_profiling()), (0, false));
    for (id, model) in ["a", "b", "c"].into_iter().enumerate() {
        hold(&mut ledger, id as u64, request("weights", 0, Class::Weights, model, 10));
    }
    assert_eq!((ledger.profiling(), ledger.is_profiling()), (3, true));
    gate(&mut ledger, "a", Gate::Frozen);
    assert_eq!((ledger.profiling(), ledger.is_profiling()), (2, true));
    gate(&mut ledger, "b", Gate::Teardown);
    gate(&mut ledger, "c", Gate::Frozen);
    assert_eq!((ledger.profiling(), ledger.is_profiling()), (0, false));
}

#[test]
fn external_and_host_leases_open_no_gate() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("index", 0, Class::external("index"), "mine", 10));
    hold(&mut ledger, 2, request("vision", 0, Class::Host, "mine", 10));
    assert!(ledger.snapshot().gates.is_empty() && !ledger.is_profiling());
    hold(&mut ledger, 3, request("kv", 0, Class::Kv, "mine", 10));
    assert!(ledger.is_profiling());
}

#[test]
fn a_ledger_counts_waiting_requests_for_each_memory() {
    let mut ledger = Ledger::new(LedgerConfig { host_total: Bytes(100), ..LedgerConfig::new(Bytes(1000)) });
    hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 1000));
    hold(&mut ledger, 2, request("vision", 0, Class::Host, "demo", 100));
    for id in 3..6 {
        ask(&mut ledger, id, request("kv", 0, Class::Kv, "demo", 10), true);
    }
    for id in 6..8 {
        ask(&mut ledger, id, request("vision", 0, Class::Host, "demo", 10), true);
    }
    assert_eq!((ledger.waiting_for(Memory::Device), ledger.waiting_for(Memory::Host)), (3, 2));
    assert_eq!(ledger.snapshot().waiting.len(), 5);
}

#[test]
fn a_ledger_reuses_no_lease_number_of_its_predecessor() {
    let mut ledger = ledger();
    ledger.number_leases_after(LeaseId(9));
    ledger.number_leases_after(LeaseId(5));
    assert_eq!(hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 10)), LeaseId(10));
}

#[test]
#[should_panic(expected = "lease 2 was never granted")]
fn releasing_a_lease_that_was_never_granted_panics() {
    let mut ledger = ledger();
    assert_eq!(hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 10)), LeaseId(1));
    ledger.step(Input::Release { lease: LeaseId(2), passed: true });
}

#[test]
fn a_late_death_report_of_an_earlier_generation_is_ignored() {
    let mut ledger = ledger();
    let owner = |generation| Owner::new("kv", generation);
    assert_eq!(ledger.step(Input::OwnerDied { owner: owner(3) }), [Effect::OwnerCleared { owner: owner(3) }]);
    assert!(ledger.step(Input::OwnerDied { owner: owner(2) }).is_empty());
    let late = ask(&mut ledger, 1, request("kv", 2, Class::Kv, "demo", 10), false);
    assert_eq!(refusal(late), Refusal::OwnerDead { owner: owner(2) });
    assert_eq!(ledger.step(Input::OwnerDied { owner: owner(4) }), [Effect::OwnerCleared { owner: owner(4) }]);
}

#[test]
fn an_owners_death_refuses_only_its_waiting_requests() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("weights", 0, Class::Weights, "demo", 1000));
    for (id, name, generation) in [(2, "kv", 0), (3, "kv", 1), (4, "kv", 2), (5, "other", 0), (6, "other", 1)] {
        ask(&mut ledger, id, request(name, generation, Class::Kv, "demo", 10), true);
    }
    let refused: Vec<u64> = ledger
        .step(Input::OwnerDied { owner: Owner::new("kv", 1) })
        .iter()
        .filter_map(|effect| if let Effect::Refused(refused) = effect { Some(refused.request.0) } else { None })
        .collect();
    assert_eq!(refused, [2, 3]);
}

#[test]
fn a_resize_to_the_same_size_passes_waiting_requests() {
    let mut ledger = ledger();
    let graphs = hold(&mut ledger, 1, request("graph", 0, Class::Graphs, "demo", 1000));
    ask(&mut ledger, 2, request("kv", 0, Class::Kv, "demo", 10), true);
    for passed in [true, false] {
        assert!(matches!(resize(&mut ledger, 3, graphs, 1000, passed)[..], [Effect::Resized(_)]));
    }
}

#[test]
fn a_request_that_fits_exactly_does_not_overtake_waiting_requests() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 700));
    ask(&mut ledger, 2, request("large", 0, Class::Kv, "demo", 500), true);
    let exact = ask(&mut ledger, 3, request("exact", 0, Class::Kv, "demo", 300), false);
    assert_eq!(refusal(exact), Refusal::Behind { asked: Bytes(300), ahead: 1 });
    let more = ask(&mut ledger, 4, request("more", 0, Class::Kv, "demo", 301), false);
    let short = Refusal::Short { asked: Bytes(301), available: Bytes(300), short_by: Bytes(1) };
    assert_eq!(refusal(more), short);
}

#[test]
fn a_request_waits_until_its_size_becomes_unattainable() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 1));
    let waits = ask(&mut ledger, 2, request("large", 0, Class::Kv, "demo", 1000), true);
    assert_eq!(waits, [Effect::Waiting { request: RequestId(2), ahead: 0 }]);
    assert!(ledger.step(Input::Overhead(Bytes::ZERO)).is_empty());
    let hopeless = refusal(ledger.step(Input::Overhead(Bytes(1))));
    let expected = Refusal::TooLarge { asked: Bytes(1000), attainable: Bytes(999), short_by: Bytes(1) };
    assert_eq!(hopeless, expected);
    assert!(matches!(ledger.step(Input::Release { lease: kv, passed: true })[..], [Effect::Freed { .. }]));
}

#[test]
fn a_reservation_belongs_to_one_model_and_one_class() {
    let mut ledger = ledger();
    let lease = hold(&mut ledger, 1, request("lane", 0, Class::Graphs, "a", 50));
    hold(&mut ledger, 2, request("lane", 0, Class::StepWorkspace, "a", 30));
    hold(&mut ledger, 3, request("lane", 0, Class::Graphs, "b", 20));
    gate(&mut ledger, "a", Gate::Frozen);
    ledger.step(Input::Release { lease, passed: true });
    hold(&mut ledger, 4, request("lane", 0, Class::Graphs, "a", 50));
    let more = refusal(ask(&mut ledger, 5, request("lane", 0, Class::Graphs, "a", 1), false));
    assert_eq!(more.to_string(), "the gate of a is frozen: lane#0 may hold 50 B of graphs, but asked for 51 B in all");
}

#[test]
fn a_reservation_is_shared_by_all_generations_of_an_owner() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("lane", 1, Class::Graphs, "demo", 50));
    gate(&mut ledger, "demo", Gate::Frozen);
    let earlier = refusal(ask(&mut ledger, 2, request("lane", 0, Class::Graphs, "demo", 50), false));
    assert_eq!(
        earlier.to_string(),
        "the gate of demo is frozen: lane#0 may hold 50 B of graphs, but asked for 100 B in all"
    );
}

#[test]
fn an_elastic_claimant_without_a_reservation_is_refused() {
    let mut ledger = ledger();
    hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 50));
    gate(&mut ledger, "demo", Gate::Frozen);
    hold(&mut ledger, 2, request("kv", 0, Class::Kv, "demo", 50));
    let late = refusal(ask(&mut ledger, 3, request("late", 0, Class::Kv, "demo", 1), false));
    assert!(matches!(late, Refusal::GateClosed { reserved: Bytes::ZERO, .. }));
}

#[test]
fn an_open_gate_cannot_be_opened_again() {
    let mut ledger = ledger();
    assert!(matches!(gate(&mut ledger, "demo", Gate::Open)[..], [Effect::GateMoved { .. }]), "the gate is new");
    let [Effect::GateStuck(stuck)] = &gate(&mut ledger, "demo", Gate::Open)[..] else { panic!("it is open") };
    assert_eq!(stuck.to_string(), "the gate of demo is open and cannot become open");
    gate(&mut ledger, "demo", Gate::Frozen);
    assert!(matches!(gate(&mut ledger, "demo", Gate::Open)[..], [Effect::GateMoved { .. }]), "measured again");
    assert_eq!(ledger.gate("demo"), Gate::Open);
}

#[test]
fn a_models_teardown_waits_only_for_its_own_leases() {
    let mut ledger = ledger();
    let gone = hold(&mut ledger, 1, request("kv", 0, Class::Kv, "gone", 50));
    hold(&mut ledger, 2, request("kv", 0, Class::Kv, "stays", 70));
    gate(&mut ledger, "gone", Gate::Teardown);
    let [Effect::GateStuck(stuck)] = &gate(&mut ledger, "gone", Gate::Open)[..] else { panic!("it holds 50 B") };
    assert_eq!(stuck.to_string(), "the gate of gone cannot reopen: the model still holds 50 B");
    assert_eq!(stuck.hint().unwrap(), "wait until the model's owners are cleared");
    ledger.step(Input::Release { lease: gone, passed: true });
    assert!(matches!(gate(&mut ledger, "gone", Gate::Open)[..], [Effect::GateMoved { .. }]));
}

#[test]
fn a_reminder_repeats_orders_and_reports_the_uncovered_deficit() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 200));
    hold(&mut ledger, 2, request("weights", 0, Class::Weights, "demo", 600));
    ledger.step(Input::Canary(Bytes(100)));
    ledger.step(Input::Foreign(Bytes(210))); // Canary given up: deficit 10, owed 110.
    let order = |to| Effect::GiveUp { lease: kv, owner: Owner::new("kv", 0), class: Class::Kv, to: Bytes(to) };
    let deficit = |uncovered| Effect::Deficit { short_by: Bytes(10), uncovered: Bytes(uncovered) };
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes(40) }), [deficit(0), order(50)]);
    ledger.step(Input::Floor { lease: kv, to: Bytes(193) });
    // `kv` can free 7 of the 110 bytes owed. This leaves 3 bytes of the deficit of 10 uncovered.
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes::ZERO }), [deficit(3), order(193)]);
    assert_eq!(ledger.step(Input::Remind { ahead: Bytes(40) }), [deficit(3), order(193)]);
}

#[test]
fn host_memory_that_is_being_freed_covers_no_device_deficit() {
    let mut ledger = ledger();
    let kv = hold(&mut ledger, 1, request("kv", 0, Class::Kv, "demo", 600));
    let cache = hold(&mut ledger, 2, request("vision", 0, Class::VisionCache, "demo", 400));
    let pictures = hold(&mut ledger, 3, request("vision", 0, Class::Host, "demo", 500));
    ledger.step(Input::Release { lease: pictures, passed: false });
    ledger.step(Input::Release { lease: cache, passed: false });
    let effects = ledger.step(Input::Foreign(Bytes(450)));
    let order = Effect::GiveUp { lease: kv, owner: Owner::new("kv", 0), class: Class::Kv, to: Bytes(550) };
    assert_eq!(effects, [Effect::Deficit { short_by: Bytes(450), uncovered: Bytes(0) }, order]);
}

#[test]
fn every_refusal_has_a_name_and_a_hint() {
    let (owner, bytes) = (Owner::new("kv", 0), Bytes(2000));
    let closed = |gate| Refusal::GateClosed {
        model: "demo".into(),
        gate,
        owner: owner.clone(),
        class: Class::Kv,
        reserved: bytes,
        asked: bytes,
    };
    let full = Overloaded { waiting: 1, waiting_max: 1 };
    let busy = "ask again later, ask for less, or raise the limit of the queue";
    let table = [
        (
            Refusal::Short { asked: bytes, available: bytes, short_by: bytes },
            "short",
            Some("ask for 2,000 B less, wait, or free that much elsewhere"),
        ),
        (
            Refusal::TooLarge { asked: bytes, attainable: bytes, short_by: bytes },
            "too_large",
            Some("ask for 2,000 B less, keep a smaller canary, or use a larger device"),
        ),
        (
            Refusal::Behind { asked: bytes, ahead: 1 },
            "behind",
            Some("wait in the queue, or raise the request's priority"),
        ),
        (Refusal::Overloaded(full), "overloaded", Some(busy)),
        (closed(Gate::Teardown), "gate_closed", Some("wait until the model has stopped, then load it")),
        (
            closed(Gate::Frozen),
            "gate_closed",
            Some("take the lease before the model is ready, or as an external lease"),
        ),
        (Refusal::OwnerDead { owner: owner.clone() }, "owner_dead", None),
        (
            Refusal::PredecessorHolds { owner: owner.clone(), held: bytes },
            "predecessor_holds",
            Some("start the successor after the `OwnerCleared` effect"),
        ),
        (Refusal::NotHeld { lease: LeaseId(1) }, "not_held", None),
        (Refusal::Nothing, "nothing", None),
        (Refusal::CanaryAsked, "canary_asked", Some("set the canary's size instead")),
        (Refusal::Withdrawn, "withdrawn", None),
    ];
    for (reason, name, hint) in &table {
        assert_eq!((reason.name(), reason.hint().as_deref()), (*name, *hint));
        let refused = Refused { request: RequestId(1), reason: reason.clone() };
        assert_eq!(refused.hint().as_deref(), *hint, "a refusal has the hint of its reason");
    }
    let mut names: Vec<_> = table.iter().map(|(reason, ..)| reason.name()).collect();
    names.dedup();
    assert_eq!(names, Refusal::NAMES);
}
