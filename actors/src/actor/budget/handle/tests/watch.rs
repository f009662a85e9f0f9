//! Tests of a budget that watches its device, and of leases whose owners obey resize orders. Time
//! is paused and advanced by the test.

use bursar_budgets::testing::HostControl;
use std::{sync::Mutex, time::Duration};

use bursar_budgets::Fence;

use super::*;
use crate::budget::{Elastic, ResizeOrder};

/// A KV cache that fills a device of 64 MiB, except for a canary of 4 MiB and 2 MiB that stay free.
struct Filled {
    bed: Bed,
    lease: Arc<Lease>,
    segment: Segment,
    recorded: Arc<Mutex<Vec<ResizeOrder>>>,
}

const MIB: fn(u64) -> Bytes = Bytes::mib;

impl Filled {
    async fn new() -> Filled {
        let bed = Bed::new().await;
        let lease = Arc::new(bed.lease(&owner(0), MIB(58)).await.expect("the budget has memory for a lease"));
        let segment = Segment::reserve(bed.device.clone(), MIB(64), lease.clone()).expect("addresses");
        segment.back_to(MIB(58)).expect("the segment is backed within its lease");
        bed.budget
            .move_gate(Label::from("demo"), Gate::Frozen)
            .await
            .expect("the budget answers")
            .expect("the gate freezes");
        let recorded = Arc::<Mutex<Vec<ResizeOrder>>>::default();
        let listener = recorded.clone();
        let orders = Arc::new(move |order| listener.lock().expect("the lock is not poisoned").push(order));
        bed.budget
            .accept_resize_orders(&lease, Elastic { floor: MIB(8), most: MIB(58), step: MIB(1), lends: None, orders });
        Filled { bed, lease, segment, recorded }
    }

    /// Advances time by this many seconds. Returns the orders received during that time, without
    /// consecutive duplicates.
    async fn pass(&self, seconds: u64) -> Vec<ResizeOrder> {
        for _ in 0..seconds {
            self.pass_for(Duration::from_secs(1)).await;
        }
        let mut recorded = self.recorded();
        recorded.dedup();
        recorded
    }

    async fn pass_for(&self, time: Duration) {
        tokio::time::advance(time).await;
        // All actors share this thread. Yielding lets the timer fire, so that the probe runs before
        // the next call to the budget.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        self.bed.snapshot().await;
    }

    fn recorded(&self) -> Vec<ResizeOrder> {
        std::mem::take(&mut self.recorded.lock().expect("the lock is not poisoned"))
    }

    async fn resize(&self, to: Bytes) {
        let shrinks = to < self.lease.bytes();
        if shrinks {
            self.segment.shrink_to(to, &Fence::passed()).expect("the bytes are backed");
        }
        self.bed.budget.resize(tree::RESIZE_FOR_ENGINE, &self.lease, to).await.expect("the budget answers");
        if !shrinks {
            self.segment.back_to(to).expect("the segment is backed within its lease");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn shrink_orders_follow_foreign_growth_within_a_second_until_covered() {
    let filled = Filled::new().await;
    assert_eq!(filled.pass(3).await, [], "no other process has taken memory");
    filled.bed.device.foreign_takes(MIB(5));
    let give = ResizeOrder::GiveUp { to: MIB(55) };
    assert_eq!(filled.pass(1).await, [give], "3 of the canary's 4 MiB are missing");
    assert!(filled.bed.snapshot().await.canary.is_zero(), "the canary was given up first");
    assert_eq!(filled.pass(2).await, [give], "the order is repeated until the cache has shrunk");
    filled.resize(MIB(55)).await;
    let ledger = filled.bed.snapshot().await;
    assert_eq!((ledger.canary, ledger.free, ledger.foreign), (MIB(4), MIB(0), MIB(5)), "{ledger}");
    assert_eq!(filled.pass(3).await, []);
}

#[tokio::test(start_paused = true)]
async fn foreign_growth_makes_probes_sixteen_times_as_frequent() {
    let filled = Filled::new().await;
    let sixteenth = Duration::from_millis(63);
    filled.bed.device.foreign_takes(MIB(5));
    assert_eq!(filled.pass(1).await, [ResizeOrder::GiveUp { to: MIB(55) }]);
    // The other process takes all free memory each time.
    for size in [55, 49, 43] {
        filled.resize(MIB(size)).await;
        assert!(filled.bed.device.foreign_takes(MIB(64)) >= MIB(1));
        filled.pass_for(sixteenth).await;
        filled.pass_for(sixteenth).await;
        let order = filled.recorded().pop().expect("the device was probed within an eighth of a second");
        assert_eq!(
            order,
            ResizeOrder::GiveUp { to: MIB(size - 6) },
            "the cache gives up the canary's 4 MiB and 2 MiB in advance"
        );
    }
    filled.resize(MIB(37)).await;
    filled.pass(2).await;
    filled.bed.device.foreign_takes(MIB(64));
    filled.pass_for(Duration::from_millis(60)).await;
    let give = ResizeOrder::GiveUp { to: MIB(33) };
    assert_eq!(
        filled.recorded(),
        [give],
        "a quick check detected the growth, and after a second without growth no bytes are freed in advance"
    );
}

#[tokio::test(start_paused = true)]
async fn unbacked_but_leased_bytes_do_not_hide_foreign_memory() {
    let filled = Filled::new().await;
    filled.bed.device.foreign_takes(MIB(6));
    assert_eq!(filled.pass(1).await, [ResizeOrder::GiveUp { to: MIB(54) }]);
    filled.segment.shrink_to(MIB(54), &Fence::passed()).expect("the bytes are backed");
    // The resize is half done. The other process holds as much memory as before, so the canary must
    // not change.
    assert_eq!(filled.pass(1).await, [ResizeOrder::GiveUp { to: MIB(54) }]);
    let ledger = filled.bed.snapshot().await;
    assert_eq!((ledger.foreign, ledger.canary), (MIB(6), MIB(0)), "{ledger}");
}

#[tokio::test(start_paused = true)]
async fn no_cache_is_ordered_to_shrink_below_its_floor() {
    let filled = Filled::new().await;
    filled.resize(MIB(10)).await;
    filled.bed.device.foreign_takes(MIB(64));
    assert_eq!(filled.pass(1).await, [ResizeOrder::GiveUp { to: MIB(8) }]);
    filled.resize(MIB(8)).await;
    filled.bed.device.foreign_takes(MIB(64));
    assert_eq!(filled.pass(3).await, [], "a cache at its floor has no memory to give up");
    let ledger = filled.bed.snapshot().await;
    assert_eq!((ledger.canary, ledger.granted, ledger.foreign), (MIB(0), MIB(8), MIB(56)), "{ledger}");
}

#[tokio::test(start_paused = true)]
async fn freed_memory_refills_the_canary_before_caches_grow() {
    let filled = Filled::new().await;
    filled.bed.device.foreign_takes(MIB(6));
    filled.pass(1).await;
    filled.resize(MIB(54)).await;
    assert_eq!(filled.pass(30).await, [], "only the canary's bytes are free");
    filled.bed.device.foreign_gives_back(MIB(3));
    // The first probe that sees the memory runs a second later. The tenth probe after that offers
    // growth.
    let may = |to| ResizeOrder::MayGrow { to: MIB(to) };
    assert_eq!(filled.pass(10).await, []);
    assert_eq!(filled.pass(1).await, [may(57)]);
    assert_eq!(filled.pass(11).await, [may(57)], "growth that was not taken is offered again");
    filled.resize(MIB(57)).await;
    filled.bed.device.foreign_gives_back(MIB(3));
    assert_eq!(filled.pass(11).await, [may(58)], "2 MiB were free from the start and are not offered");
    filled.resize(MIB(58)).await;
    assert_eq!(filled.pass(60).await, [], "the cache is back at its full size");
}

#[tokio::test(start_paused = true)]
async fn a_waiting_lease_is_granted_before_caches_may_grow() {
    let filled = Filled::new().await;
    filled.resize(MIB(50)).await;
    let waiting = tokio::spawn({
        let budget = filled.bed.budget.clone();
        async move { budget.lease(Class::external("mine"), MIB(12)).await }
    });
    assert_eq!(filled.pass(30).await, [], "10 MiB are free, but the waiting lease needs 12");
    filled.resize(MIB(48)).await;
    let tenant = waiting.await.expect("the task does not panic").expect("the budget has memory for a lease");
    assert_eq!((tenant.bytes(), filled.pass(30).await), (MIB(12), vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_budgets_successor_repeats_pending_shrink_orders() {
    let mut filled = Filled::new().await;
    filled.bed.device.foreign_takes(MIB(5));
    let give = ResizeOrder::GiveUp { to: MIB(55) };
    assert_eq!(filled.pass(1).await, [give]);
    filled.bed.kill().await;
    filled.bed.succeed().await;
    // This call starts the successor's probe timers before the test advances time.
    filled.bed.snapshot().await;
    assert_eq!(filled.pass(1).await, [give], "the successor knows the lease and its floor");
    filled.resize(MIB(55)).await;
    assert_eq!(filled.pass(2).await, []);
}

#[tokio::test(start_paused = true)]
async fn unleased_bytes_of_a_model_being_sized_are_not_foreign() {
    let filled = Filled::new().await;
    let request = Request::new(Owner::new("other", 0), Class::Weights, "other", MIB(1));
    let other =
        filled.bed.budget.ask(tree::LEASE_FOR_ENGINE, request, false).await.expect("the budget has memory for a lease");
    // These bytes simulate captured graphs, whose memory is allocated before it is leased.
    filled.bed.device.foreign_takes(MIB(5));
    assert_eq!(filled.pass(3).await, []);
    assert!(filled.bed.snapshot().await.foreign.is_zero());
    filled
        .bed
        .budget
        .move_gate(Label::from("other"), Gate::Frozen)
        .await
        .expect("the budget answers")
        .expect("the gate freezes");
    assert!(
        matches!(filled.pass(1).await[..], [ResizeOrder::GiveUp { .. }]),
        "after READY, unleased bytes belong to another process"
    );
    drop(other);
}

#[tokio::test(start_paused = true)]
async fn only_bytes_that_appear_during_sizing_are_overhead() {
    let filled = Filled::new().await;
    let (budget, device) = (&filled.bed.budget, &filled.bed.device);
    let books = async || {
        budget.available_while_sizing().await.expect("the budget answers");
        let ledger = filled.bed.snapshot().await;
        (ledger.overhead, ledger.foreign)
    };
    device.drifts(Bytes::kib(512));
    filled.pass(2).await;
    assert_eq!(
        books().await,
        (Bytes::ZERO, Bytes::kib(512)),
        "no model is being sized, so the drift counts as foreign"
    );
    let gate = async |model, to| {
        budget.move_gate(Label::from(model), to).await.expect("the budget answers").expect("the gate moves")
    };
    gate("demo", Gate::Open).await;
    device.drifts(Bytes::kib(256));
    assert_eq!(
        books().await,
        (Bytes::kib(256), Bytes::kib(512)),
        "bytes that appear while one model is sized, such as at a library's first use, are overhead"
    );
    gate("another", Gate::Open).await;
    device.drifts(Bytes::kib(128));
    assert_eq!(
        books().await,
        (Bytes::kib(256), Bytes::kib(640)),
        "while two models are sized, new bytes cannot be assigned to either and are foreign"
    );
}

#[tokio::test(start_paused = true)]
async fn bytes_the_driver_keeps_of_an_unloaded_model_are_overhead() {
    let filled = Filled::new().await;
    let (budget, device) = (&filled.bed.budget, &filled.bed.device);
    // The addresses of captured graphs are unknown to the budget, and the driver keeps their memory
    // in a pool.
    let gate = async |to| {
        budget.move_gate(Label::from("demo"), to).await.expect("the budget answers").expect("the gate moves")
    };
    gate(Gate::Open).await;
    let request = Request::new(owner(0), Class::Graphs, "demo", Bytes::kib(512));
    let graphs = budget.ask(tree::LEASE_FOR_ENGINE, request, false).await.expect("the budget has memory for a lease");
    gate(Gate::Frozen).await;
    device.drifts(Bytes::kib(256));
    filled.pass(2).await;
    let books = async || {
        let ledger = filled.bed.snapshot().await;
        (ledger.overhead, ledger.foreign)
    };
    assert_eq!(books().await, (Bytes::ZERO, Bytes::ZERO), "the lease covers the bytes");
    drop(graphs);
    assert_eq!(
        books().await,
        (Bytes::kib(512), Bytes::ZERO),
        "until the next probe, all bytes of the lease may still be held"
    );
    filled.pass(2).await;
    assert_eq!(books().await, (Bytes::kib(256), Bytes::ZERO), "bytes that the driver no longer holds are not overhead");
    device.drifts(Bytes::kib(128));
    filled.pass(2).await;
    assert_eq!(books().await, (Bytes::kib(256), Bytes::kib(128)), "later growth is drift, which is foreign");
}
