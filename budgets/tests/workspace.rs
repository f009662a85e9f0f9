//! Tests of the workspace, and a comparison of its stack with a naive stack.

use bursar_budgets::testing::HostControl;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bursar_budgets::*;
use proptest::prelude::*;

#[test]
fn a_dropped_frame_frees_temporaries_and_keeps_the_high_water() {
    let workspace = Workspace::dry();
    let outer = workspace.frame();
    let first = outer.take(Bytes(1)).unwrap();
    {
        let inner = outer.frame();
        let second = inner.take(Bytes(257)).unwrap();
        assert_eq!(second.address, first.address.offset(Bytes(256)));
        assert_eq!((inner.used(), outer.used()), (Bytes(512), Bytes(768)));
    }
    assert_eq!((workspace.used(), workspace.high_water()), (Bytes(256), Bytes(768)));
    drop(outer);
    workspace.reset_high_water();
    assert_eq!((workspace.used(), workspace.high_water()), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn a_full_workspace_reports_its_sizes_and_stays_unchanged() {
    let device = std::sync::Arc::new(HostDevice::new(HostConfig::small(Bytes::kib(64))).unwrap());
    let mut ledger = Ledger::new(LedgerConfig::of(device.as_ref()));
    let request = Request::new(Owner::new("lane", 0), Class::StepWorkspace, "demo", Bytes::kib(64));
    let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
    let Effect::Granted(grant) = &effects[0] else { unreachable!() };
    struct Nobody;
    impl ReleaseNotes for Nobody {
        fn post(&self, _: ReleaseNote) {}
    }
    let lease = Lease::issue(grant, std::sync::Arc::new(Nobody));
    let segment = Segment::reserve(device.clone(), Bytes::kib(64), lease).unwrap();
    segment.back_to(Bytes::kib(64)).unwrap();
    let (address, id) = (segment.address(), segment.lease().id());
    let workspace = Workspace::over(segment);
    assert_eq!((workspace.is_dry(), workspace.address(), workspace.capacity()), (false, address, Bytes::kib(64)));
    assert_eq!(workspace.segment().map(|segment| segment.lease().id()), Some(id));
    let frame = workspace.frame();
    frame.take(Bytes(60_000)).unwrap();
    let full = frame.take(Bytes(6_000)).unwrap_err();
    let expected = "a temporary of 6,144 B does not fit the workspace: 60,160 B of its 65,536 B are in use";
    assert_eq!(full.to_string(), expected);
    assert_eq!(full.hint(), "plan a workspace that is 768 B larger, or lower the envelope");
    assert_eq!((workspace.used(), workspace.high_water()), (Bytes(60_160), Bytes(60_160)));
    frame.take(Bytes(5_376)).unwrap();
    assert_eq!(workspace.used(), workspace.capacity());
    assert_eq!(device.counts().backs, 1, "a workspace never calls the driver");
}

#[test]
#[should_panic(expected = "frame 1 of 2 is not on top: drop the inner frames first to take from it")]
fn taking_from_an_outer_frame_under_an_inner_frame_panics() {
    let workspace = Workspace::dry();
    let outer = workspace.frame();
    let _inner = outer.frame();
    let _ = outer.take(Bytes(1));
}

#[test]
#[should_panic(expected = "frame 1 of 2 is not on top: drop the inner frames first to drop it")]
fn dropping_an_outer_frame_before_its_inner_frame_panics() {
    let workspace = Workspace::dry();
    let outer = workspace.frame();
    let _inner = workspace.frame();
    drop(outer);
}

#[test]
#[should_panic(expected = "frame 1 of 2 is not on top: drop the inner frames first to open another on it")]
fn opening_a_frame_below_a_live_frame_panics() {
    let workspace = Workspace::dry();
    let outer = workspace.frame();
    let _inner = workspace.frame();
    let _ = outer.frame();
}

#[test]
fn a_dry_workspace_has_no_memory_and_no_capacity_limit() {
    let workspace = Workspace::dry();
    assert!(workspace.is_dry() && workspace.segment().is_none());
    assert_eq!((workspace.capacity(), workspace.address()), (Bytes::MAX, Address(1 << 60)));
    let frame = workspace.frame();
    let whole = frame.take(Bytes::MAX).unwrap_err();
    assert_eq!((whole.asked, whole.used), (Bytes::MAX, Bytes::ZERO));
}

#[test]
fn a_workspace_is_empty_after_a_panic_inside_nested_frames() {
    let workspace = Workspace::dry();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let outer = workspace.frame();
        let inner = outer.frame();
        inner.take(Bytes(1000)).unwrap();
        panic!("the step fails");
    }));
    assert!(unwound.is_err());
    assert_eq!(workspace.used(), Bytes::ZERO);
    assert!(workspace.frame().take(Bytes(1)).is_ok());
}

/// A program of nested frames. Each step takes a number of bytes, or opens a frame and runs
/// a program in it.
#[derive(Clone, Debug)]
enum Op {
    Take(u64),
    Nest(Vec<Op>),
}

fn program() -> impl Strategy<Value = Vec<Op>> {
    let leaf = (0..5000u64).prop_map(Op::Take);
    let op = leaf.prop_recursive(5, 64, 8, |inner| proptest::collection::vec(inner, 0..8).prop_map(Op::Nest));
    proptest::collection::vec(op, 0..12)
}

/// A naive stack, which lists the start and end of each temporary in use.
#[derive(Default)]
struct Naive {
    living: Vec<(u64, u64)>,
    high_water: u64,
}

fn run(frame: &Frame<'_>, naive: &mut Naive, program: &[Op]) {
    let base = frame.workspace().address();
    for op in program {
        match op {
            Op::Take(bytes) => {
                let allocation = frame.take(Bytes(*bytes)).unwrap();
                let start = allocation.address.distance_from(base).0;
                assert!(start.is_multiple_of(256));
                for (from, to) in &naive.living {
                    assert!(start >= *to || start + bytes <= *from, "temporaries in use do not overlap");
                }
                naive.living.push((start, start + bytes));
                let used: u64 = naive.living.iter().map(|(from, to)| (to - from).div_ceil(256) * 256).sum();
                naive.high_water = naive.high_water.max(used);
                assert_eq!(frame.workspace().used(), Bytes(used));
            }
            Op::Nest(inner) => {
                let living = naive.living.len();
                run(&frame.frame(), naive, inner);
                naive.living.truncate(living);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_workspace_stack_agrees_with_a_list_of_temporaries(program in program()) {
        let workspace = Workspace::dry();
        let mut naive = Naive::default();
        run(&workspace.frame(), &mut naive, &program);
        prop_assert_eq!(workspace.used(), Bytes::ZERO);
        prop_assert_eq!(workspace.high_water(), Bytes(naive.high_water));
    }
}
