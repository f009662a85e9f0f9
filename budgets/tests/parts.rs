//! Tests of small types: queues, gates, reservations, sums, plans, snapshots, names, and the
//! defaults of `Device`.

use std::{any::Any, borrow::Borrow, sync::Arc};

use bursar_budgets::*;

fn waiting(id: u64, priority: Priority, bytes: u64) -> Waiting<()> {
    Waiting { id: RequestId(id), priority, bytes: Bytes(bytes), kind: () }
}

#[test]
fn the_admission_queue_orders_requests_by_priority() {
    let mut queue = Admission::new(3);
    assert!(queue.is_empty() && !queue.holds(RequestId(1)));
    assert_eq!(queue.push(waiting(1, Priority::Serving, 5)), Ok(0));
    assert_eq!(queue.push(waiting(2, Priority::Serving, 1)), Ok(1));
    assert_eq!(queue.push(waiting(3, Priority::Startup, 9)), Ok(0));
    assert!(!queue.is_empty() && queue.holds(RequestId(1)) && !queue.holds(RequestId(4)));
    let ahead = [Priority::Background, Priority::Serving, Priority::Startup].map(|priority| queue.ahead_of(priority));
    assert_eq!(ahead, [3, 3, 1]);
    let overloaded = queue.push(waiting(4, Priority::Startup, 1)).unwrap_err();
    assert_eq!((overloaded.waiting, overloaded.waiting_max), (3, 3));
    assert_eq!(overloaded.hint(), "ask again later, ask for less, or raise the limit of the queue");
    assert_eq!(queue.pop_fitting(Bytes(8)), None);
    assert_eq!(queue.pop_fitting(Bytes(9)).unwrap().id, RequestId(3));
    let left = queue.withdraw(|waiting| waiting.id == RequestId(1));
    assert_eq!(left, [waiting(1, Priority::Serving, 5)]);
    assert_eq!(queue.iter().map(|waiting| waiting.id.0).collect::<Vec<_>>(), [2]);
}

#[test]
#[should_panic(expected = "request 1 is already waiting")]
fn queueing_the_same_request_twice_panics() {
    let mut queue = Admission::new(3);
    let _ = queue.push(waiting(1, Priority::Serving, 5));
    let _ = queue.push(waiting(1, Priority::Startup, 5));
}

#[test]
fn a_gate_makes_only_the_listed_transitions() {
    use Gate::{Frozen, Open, Teardown};
    let moves = |from: Gate, to, held| from.check_move("demo", to, Bytes(held)).is_ok();
    for (from, to) in [(Open, Frozen), (Open, Teardown), (Frozen, Open), (Frozen, Teardown)] {
        assert!(moves(from, to, 9), "{from} to {to}");
    }
    for (from, to) in [(Open, Open), (Frozen, Frozen), (Teardown, Frozen), (Teardown, Teardown)] {
        let error = from.check_move("demo", to, Bytes::ZERO).unwrap_err();
        assert_eq!(error.to_string(), format!("the gate of demo is {from} and cannot become {to}"));
        assert_eq!(error.hint(), None);
    }
    assert!(moves(Teardown, Open, 0) && !moves(Teardown, Open, 1));
    assert_eq!(format!("{Open:>7}|{Frozen:>7}|{Teardown:>9}|"), "   open| frozen| teardown|");
}

#[test]
fn a_reservation_sums_all_generations_of_an_owner() {
    let mut reservations = Reservations::default();
    reservations.add(&Owner::new("kv", 0), &Class::Kv, Bytes(5));
    reservations.add(&Owner::new("kv", 1), &Class::Kv, Bytes(7));
    reservations.add(&Owner::new("kv", 0), &Class::Graphs, Bytes(1));
    assert_eq!(reservations.reserved(&Owner::new("kv", 2), &Class::Kv), Some(Bytes(12)));
    assert_eq!(reservations.reserved(&Owner::new("kv", 2), &Class::Graphs), Some(Bytes(1)));
    assert_eq!(reservations.reserved(&Owner::new("kv", 2), &Class::Host), None);
}

#[test]
fn an_account_counts_each_byte_once() {
    let account = Account {
        total: Bytes(1000),
        overhead: Bytes(10),
        foreign: Bytes(200),
        granted: Bytes(600),
        canary: Bytes(40),
        canary_wanted: Bytes(90),
    };
    assert_eq!((account.free(), account.available(), account.attainable()), (Bytes(150), Bytes(100), Bytes(900)));
    assert_eq!((account.deficit(), account.owed()), (Bytes(0), Bytes(0)));
    let short = Account { foreign: Bytes(370), ..account };
    assert_eq!((short.free(), short.available()), (Bytes(0), Bytes(0)));
    assert_eq!((short.deficit(), short.owed()), (Bytes(20), Bytes(70)));
}

#[test]
fn a_plan_keeps_its_lines_and_sums_them_by_class() {
    let plan = MemoryPlan::new()
        .claim(Class::Kv, "layers", Bytes(5), "5 x 1 B")
        .claim(Class::Weights, "demo", Bytes(70), "70 x 1 B")
        .claim(Class::Kv, "probe", Bytes(8), "8 x 1 B");
    let lines: Vec<_> = plan.claims().iter().map(|claim| (claim.what.as_str(), claim.bytes.0)).collect();
    assert_eq!(lines, [("layers", 5), ("demo", 70), ("probe", 8)]);
    let sums = [Class::Kv, Class::Weights, Class::Graphs].map(|class| plan.of_class(&class).0);
    assert_eq!((sums, plan.total()), ([13, 70, 0], Bytes(83)));
    assert_eq!(Knob::advice(&[]), None);
    let nothing = plan.fits(Bytes(82), Vec::new).unwrap_err();
    assert_eq!((nothing.short_by, nothing.hint()), (Bytes(1), None));
    let words = Knob::new("a smaller model", 2, 1);
    assert_eq!(Knob::advice(&[words]).unwrap(), "set a smaller model to 1 instead of 2");
}

fn hold(ledger: &mut Ledger, id: u64, owner: &str, class: Class, model: &str, bytes: u64) -> LeaseId {
    let request = Request::new(Owner::new(owner, 0), class, model, Bytes(bytes));
    match &ledger.step(Input::Ask { id: RequestId(id), request, wait: false })[..] {
        [Effect::Granted(grant)] => grant.holding().id,
        other => panic!("{other:?}"),
    }
}

/// Two models with leases of device and host memory, in a ledger of 1,000 bytes: 20 are overhead,
/// 40 foreign and 60 canary.
fn shared() -> Ledger {
    let mut ledger = Ledger::new(LedgerConfig { overhead: Bytes(20), ..LedgerConfig::new(Bytes(1000)) });
    for (id, (owner, class, model, bytes)) in [
        ("kv", Class::Kv, "a", 100),
        ("kv", Class::Kv, "a", 30),
        ("weights", Class::Weights, "a", 200),
        ("vision", Class::Host, "a", 70),
        ("kv", Class::Kv, "b", 50),
        ("vision", Class::Host, "b", 11),
    ]
    .into_iter()
    .enumerate()
    {
        hold(&mut ledger, id as u64, owner, class, model, bytes);
    }
    ledger.step(Input::Foreign(Bytes(40)));
    ledger.step(Input::Canary(Bytes(60)));
    ledger
}

#[test]
fn a_snapshot_sums_by_class_and_by_model() {
    let seen = shared().snapshot();
    let sums = [Class::Kv, Class::Weights, Class::Host, Class::Graphs].map(|class| seen.of_class(&class).0);
    assert_eq!(sums, [180, 200, 81, 0]);
    let lines: Vec<_> = seen.classes.iter().map(|line| (line.class.kind(), line.leases, line.bytes.0)).collect();
    assert_eq!(lines, [("weights", 1, 200), ("kv", 3, 180), ("host", 2, 81)]);
    let of_models = ["a", "b", "c"].map(|model| seen.of_model(&model.into()).0);
    assert_eq!(of_models, [330, 50, 0]);
}

#[test]
fn a_model_may_hold_memory_that_other_models_leave_free() {
    let seen = shared().snapshot();
    let capacities = ["a", "b", "c"].map(|model| seen.capacity_of(&model.into()).0);
    let all = 1000 - 20 - 40 - 60;
    assert_eq!(capacities, [all - 50, all - 330, all - 380]);
}

#[test]
fn a_snapshot_prints_revoking_leases_and_the_deficit() {
    let mut ledger = shared();
    assert!(!ledger.snapshot().to_string().contains('('), "the canary is whole, and no lease is being returned");
    ledger.step(Input::Resize { id: RequestId(9), lease: LeaseId(1), to: Bytes(90), wait: false, passed: false });
    ledger.step(Input::Release { lease: LeaseId(3), passed: false });
    ledger.step(Input::Foreign(Bytes(610)));
    let seen = ledger.snapshot();
    let states: Vec<_> = seen.leases.iter().map(|lease| lease.state).take(3).collect();
    assert_eq!(states, [LeaseState::Shrinking, LeaseState::Held, LeaseState::Revoking]);
    let text = seen.to_string();
    let squeezed = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let notes: Vec<_> = squeezed.filter(|line| line.contains('(') || line.contains("short")).collect();
    let none = "░".repeat(23);
    let expected = [
        format!("weights a weights#0 (revoking) 200 B 200 B █████{}", "░".repeat(19)),
        format!("canary (given up) 0 B 0 B ░{none}"),
        format!("short by 10 B 10 B █{none}"),
    ];
    assert_eq!(notes, expected, "\n{text}");
}

#[test]
fn a_shrinking_lease_is_printed_in_its_owners_line() {
    let mut ledger = shared();
    ledger.step(Input::Resize { id: RequestId(9), lease: LeaseId(1), to: Bytes(90), wait: false, passed: false });
    assert!(ledger.snapshot().to_string().contains("kv#0 x2"), "the lease is in use until its fence passes");
    ledger.step(Input::Release { lease: LeaseId(2), passed: false });
    assert!(!ledger.snapshot().to_string().contains("kv#0 x2"));
}

#[test]
fn a_snapshot_lists_leases_that_wait_to_grow() {
    let mut ledger = Ledger::new(LedgerConfig::new(Bytes(100)));
    let lease = hold(&mut ledger, 1, "kv", Class::Kv, "a", 60);
    hold(&mut ledger, 2, "other", Class::Kv, "a", 40);
    ledger.step(Input::Resize { id: RequestId(3), lease, to: Bytes(70), wait: true, passed: false });
    let line = WaitingLine { request: RequestId(3), grows: Some(lease), bytes: Bytes(10), priority: Priority::Serving };
    assert_eq!(ledger.snapshot().waiting, [line]);
}

#[test]
fn a_bar_fills_from_one_cell_to_all() {
    let cells = |bytes: u64| {
        let mut ledger = Ledger::new(LedgerConfig::new(Bytes(480)));
        if bytes > 0 {
            hold(&mut ledger, 1, "kv", Class::Kv, "a", bytes);
        }
        let text = ledger.snapshot().to_string();
        let granted = text.lines().find(|line| line.starts_with("granted")).unwrap().to_owned();
        assert_eq!(granted.matches(['█', '░']).count(), 24);
        granted.matches('█').count()
    };
    assert_eq!([0, 1, 20, 29, 30, 240, 470, 480].map(cells), [0, 1, 1, 1, 2, 12, 24, 24]);
    assert!(Ledger::new(LedgerConfig::new(Bytes::ZERO)).snapshot().to_string().contains("total"), "an empty ledger");
}

#[test]
fn a_label_converts_to_and_from_its_text() {
    let label = Label::from(String::from("demo"));
    let (text, borrowed): (Arc<str>, &str) = ((&label).into(), label.borrow());
    assert_eq!((&*text, borrowed, label.as_str()), ("demo", "demo", "demo"));
    assert_eq!((Label::from(&label), Label::from("demo")), (label.clone(), label.clone()));
    assert_eq!(format!("{label:>6}|"), "  demo|");
    assert_eq!(serde_json::to_value(&label).unwrap(), "demo");
}

#[test]
fn an_owner_has_a_first_generation_and_a_successor() {
    let owner = Owner::new("kv", 3);
    assert_eq!((owner.first(), owner.successor()), (Owner::new("kv", 0), Owner::new("kv", 4)));
    assert_eq!(format!("{owner:>6}|"), "  kv#3|");
}

#[test]
fn a_request_has_the_priority_of_its_class_by_default() {
    let request = |class| Request::new(Owner::new("x", 0), class, "demo", Bytes(1));
    assert_eq!(request(Class::external("x")).priority, Priority::External);
    assert_eq!(request(Class::Kv).priority, Priority::Serving);
    assert_eq!(request(Class::Kv).priority(Priority::Background).priority, Priority::Background);
    let all = [Priority::Background, Priority::External, Priority::Serving, Priority::Startup];
    assert_eq!(all.map(|priority| priority.to_string()), ["background", "tenant", "serving", "startup"]);
    assert_eq!(RequestId(7).to_string(), "request 7");
}

#[test]
fn a_class_has_a_name_memory_and_eviction_rank() {
    let classes = [
        Class::Weights,
        Class::Kv,
        Class::States,
        Class::StepWorkspace,
        Class::VisionWorkspace,
        Class::VisionCache,
        Class::Graphs,
        Class::Host,
        Class::HostKv,
        Class::external("mine"),
    ];
    assert_eq!(classes.each_ref().map(Class::kind), Class::KINDS);
    let labels = classes.each_ref().map(Class::label);
    let words = classes.each_ref().map(|class| class.kind().replace('_', " "));
    assert_eq!(labels[..9], words[..9], "a label is the kind with spaces instead of underscores");
    assert_eq!(
        (labels[9].as_str(), Class::Canary.label(), Class::Canary.kind()),
        ("tenant:mine", "canary".into(), "canary")
    );
    let of = |is: fn(&Class) -> bool| classes.iter().filter(|class| is(class)).map(Class::kind).collect::<Vec<_>>();
    assert_eq!(of(|class| class.memory() == Memory::Host), ["host", "host_kv"]);
    assert_eq!(of(Class::is_elastic), ["kv", "vision_cache"]);
    assert_eq!(of(Class::is_guest), ["host", "tenant"]);
    assert!(Class::VisionCache.gives_up_rank() < Class::Kv.gives_up_rank());
}

#[test]
fn address_offsets_are_bytes_and_addresses_print_in_hex() {
    let start = Address(0x1000);
    let end = start.offset(Bytes(0x2a));
    assert_eq!((end, end.distance_from(start), end.to_string()), (Address(0x102a), Bytes(42), "0x102a".into()));
}

/// A device with only the required methods.
struct Plain {
    is_host_memory: bool,
}

impl Device for Plain {
    fn name(&self) -> &str {
        "plain"
    }

    fn page(&self) -> Bytes {
        Bytes::mib(2)
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn is_host_memory(&self) -> bool {
        self.is_host_memory
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        Ok(DeviceMemory { total: Bytes::ZERO, free: Bytes::ZERO })
    }

    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn overhead(&self) -> Bytes {
        Bytes::ZERO
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        Err(DeviceError::NoAddresses { bytes, reason: "it has none".into() })
    }

    fn release_reservation(&self, _: Address) -> Result<(), DeviceError> {
        Ok(())
    }

    fn back(&self, _: Address, _: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unback(&self, _: Address, _: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }

    fn timeline(&self) -> Timeline {
        Timeline::new()
    }

    fn fence_here(&self) -> Fence {
        Fence::passed()
    }
}

#[test]
fn the_default_device_methods_return_nothing() {
    let labels = [true, false].map(|is_host_memory| Plain { is_host_memory }.label());
    assert_eq!(labels, ["host", "device"]);
    let plain = Plain { is_host_memory: true };
    assert_eq!((plain.driver(), plain.overhead_by_source(), plain.process_bytes()), (String::new(), Vec::new(), None));
    let plain: Arc<dyn Device> = Arc::new(plain);
    assert!(plain.as_cuda().is_none());
}

#[test]
fn every_device_error_has_the_expected_hint_and_kind() {
    let (bytes, text) = (Bytes::mib(2), || String::from("said"));
    let table = [
        (DeviceError::Refused { asked: bytes, free: bytes, hint: text() }, Some("said"), (true, false)),
        (
            DeviceError::Lost { reason: text() },
            Some("start the program again: a process that lost a GPU cannot create another context"),
            (false, true),
        ),
        (
            DeviceError::OfCard {
                card: "cuda:1".into(),
                source: Box::new(DeviceError::Refused { asked: bytes, free: bytes, hint: text() }),
            },
            Some("said"),
            (true, false),
        ),
        (DeviceError::NoDevice { reason: text(), hint: "choose".into() }, Some("choose"), (false, false)),
        (DeviceError::Unusable { reason: text(), hint: "change".into() }, Some("change"), (false, false)),
        (
            DeviceError::HostRefused { asked: bytes, message: text() },
            Some("free host memory, or raise the limit on locked memory (ulimit -l)"),
            (false, false),
        ),
        (DeviceError::BadRange { address: Address(1), bytes, verb: "backed", reason: "said" }, None, (false, false)),
        (DeviceError::Driver { call: "call", message: text() }, None, (false, false)),
        (
            DeviceError::NoAddresses { bytes, reason: text() },
            Some("raise the limit on address space (ulimit -v)"),
            (false, false),
        ),
        (
            DeviceError::Capacity { capacity: bytes, least: bytes, most: bytes },
            Some("set `capacity` to at most 2.0 MiB, the memory of this machine"),
            (false, false),
        ),
        (
            DeviceError::BadPage { page: bytes, reason: text() },
            Some("use a power of two that is a multiple of the system's page size"),
            (false, false),
        ),
    ];
    for (error, hint, (is_refused, is_lost)) in table {
        assert_eq!(error.hint().as_deref(), hint, "{error}");
        assert_eq!((error.is_refused(), error.is_lost()), (is_refused, is_lost), "{error}");
    }
}
