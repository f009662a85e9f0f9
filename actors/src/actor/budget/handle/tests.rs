//! Tests of a budget whose actor dies, and of callers that end before they get an answer.

use bursar_budgets::testing::HostControl;
use bursar_budgets::{Device, HostConfig, HostDevice, LeaseState, LedgerConfig, Priority, Segment};
use ractor::{Actor, ActorRef};

use super::*;
use crate::budget::{BudgetActor, BudgetArguments, WatchOptions};

mod watch;

/// A budget of 64 MiB without a supervisor: the test itself starts successors.
struct Bed {
    device: Arc<HostDevice>,
    mailbox: Arc<BudgetMailbox>,
    budget: Budget,
    actor: ActorRef<BudgetMessage>,
}

impl Bed {
    async fn new() -> Bed {
        let device = Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(64))).expect("small pages"));
        let mailbox = Arc::new(BudgetMailbox::default());
        let actor = spawn(&device, &mailbox).await;
        Bed { device, budget: Budget::at(mailbox.clone()), mailbox, actor }
    }

    async fn kill(&self) {
        self.actor.kill_and_wait(None).await.expect("the actor ends");
    }

    async fn succeed(&mut self) {
        self.actor = spawn(&self.device, &self.mailbox).await;
    }

    async fn snapshot(&self) -> Snapshot {
        self.budget.snapshot().await.expect("the budget answers")
    }

    async fn lease(&self, owner: &Owner, bytes: Bytes) -> Result<Lease, LeaseError> {
        let request = Request::new(owner.clone(), Class::Kv, "demo", bytes).priority(Priority::Serving);
        self.budget.ask(tree::LEASE_FOR_ENGINE, request, true).await
    }
}

async fn spawn(device: &Arc<HostDevice>, mailbox: &Arc<BudgetMailbox>) -> ActorRef<BudgetMessage> {
    let device: Arc<dyn Device> = device.clone();
    let config = LedgerConfig::of(device.as_ref());
    let watch = WatchOptions::default();
    let arguments =
        BudgetArguments { device, mailbox: mailbox.clone(), config, canary: Bytes::mib(4), on_loss: None, watch };
    BudgetActor::spawn(None, BudgetActor, arguments).await.expect("the budget starts").0
}

fn owner(generation: u64) -> Owner {
    Owner::new("engine", generation)
}

#[tokio::test]
async fn a_lease_request_is_withdrawn_when_its_caller_is_aborted() {
    let bed = Bed::new().await;
    let all = bed.lease(&owner(0), Bytes::mib(60)).await.expect("the budget has memory for a lease");
    let asker = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.lease(Class::external("mine"), Bytes::mib(1)).await.map(drop) }
    });
    while bed.snapshot().await.waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    asker.abort();
    assert!(asker.await.expect_err("the asker was aborted").is_cancelled());
    assert!(bed.snapshot().await.waiting.is_empty(), "the withdrawal arrived before this question");
    drop(all);
    assert!(bed.snapshot().await.leases.is_empty());
}

#[tokio::test]
async fn a_lease_granted_to_a_dropped_responder_is_released() {
    let bed = Bed::new().await;
    let (reply, answer) = Responder::new();
    drop(answer);
    let request = Request::new(owner(0), Class::Kv, "demo", Bytes::mib(2));
    let ask = BudgetMessage::Ask { id: RequestId(900), request, wait: false, reply };
    bed.actor.send_message(ask).expect("the budget is running");
    assert!(bed.snapshot().await.leases.is_empty());
    assert_eq!(bed.budget.leased_bytes(), Bytes::ZERO);
}

#[tokio::test]
async fn lease_events_report_each_change_but_no_withdrawal() {
    let bed = Bed::new().await;
    let lease = bed.lease(&owner(0), Bytes::mib(50)).await.expect("the budget has memory for a lease");
    bed.budget
        .resize(tree::RESIZE_FOR_ENGINE, &lease, Bytes::mib(60))
        .await
        .expect("the budget has memory for a lease");
    bed.budget.try_lease(Class::external("mine"), Bytes::mib(1)).await.expect_err("only the canary is free");
    let asker = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.lease(Class::external("mine"), Bytes::mib(2)).await.map(drop) }
    });
    while bed.snapshot().await.waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    asker.abort();
    asker.await.expect_err("the asker was aborted");
    drop(lease);
    assert!(bed.snapshot().await.leases.is_empty());
    let events = bed.mailbox.events().recent();
    let lives: Vec<_> = events
        .iter()
        .filter_map(|recorded| match &recorded.event {
            Event::LeaseGranted(leased) => Some(("granted", leased.bytes)),
            Event::LeaseResized { to, .. } => Some(("resized", *to)),
            Event::LeaseRefused { bytes, .. } => Some(("refused", *bytes)),
            Event::LeaseFreed(leased) => Some(("freed", leased.bytes)),
            _ => None,
        })
        .collect();
    let expected = [("granted", 50), ("resized", 60), ("refused", 1), ("freed", 60)];
    assert_eq!(lives, expected.map(|(what, mib)| (what, Bytes::mib(mib))));
}

#[tokio::test]
async fn a_repeated_death_report_is_answered_every_time() {
    let bed = Bed::new().await;
    let lease = bed.lease(&owner(3), Bytes::mib(2)).await.expect("the budget has memory for a lease");
    for _ in 0..3 {
        bed.budget.clear(owner(3)).await.expect("the budget answers");
        assert!(bed.snapshot().await.leases.is_empty());
    }
    bed.budget.clear(Owner::new("stranger", 9)).await.expect("an unknown owner can be cleared");
    drop(lease);
    let refused = bed.lease(&owner(2), Bytes::mib(1)).await.expect_err("the generation is over");
    assert!(matches!(refused, LeaseError::Refused(Refusal::OwnerDead { .. })), "{refused:?}");
    bed.lease(&owner(4), Bytes::mib(1)).await.expect("the next generation gets a lease");
}

#[tokio::test]
async fn lease_releases_during_a_budget_restart_reach_the_successor() {
    let mut bed = Bed::new().await;
    let (kept, dropped) = (bed.lease(&owner(0), Bytes::mib(2)).await, bed.lease(&owner(0), Bytes::mib(3)).await);
    let kept = kept.expect("the budget has memory for a lease");
    bed.kill().await;
    drop(dropped);
    bed.succeed().await;
    let ledger = bed.snapshot().await;
    assert_eq!((ledger.granted, ledger.leases.len()), (Bytes::mib(2), 1), "{ledger}");
    assert_eq!(ledger.canary, Bytes::mib(4));
    drop(kept);
    assert!(bed.snapshot().await.leases.is_empty());
}

#[tokio::test]
async fn pending_requests_are_repeated_to_the_budgets_successor() {
    let mut bed = Bed::new().await;
    let all = bed.lease(&owner(0), Bytes::mib(60)).await.expect("the budget has memory for a lease");
    let waiting = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.lease(Class::external("mine"), Bytes::mib(1)).await }
    });
    while bed.snapshot().await.waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    bed.kill().await;
    let asked_meanwhile = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.snapshot().await }
    });
    bed.succeed().await;
    asked_meanwhile.await.expect("the task does not panic").expect("the successor answers");
    drop(all);
    let lease = waiting.await.expect("the task does not panic").expect("the successor grants the lease");
    assert_eq!(lease.bytes(), Bytes::mib(1));
}

#[tokio::test]
async fn a_closed_mailbox_fails_every_pending_request() {
    let bed = Bed::new().await;
    bed.kill().await;
    let waiting = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.snapshot().await }
    });
    bed.mailbox.close();
    let error = waiting.await.expect("the task does not panic").expect_err("the mailbox is closed");
    assert!(matches!(error, AskError::Gone { .. }));
    assert!(matches!(bed.budget.snapshot().await, Err(AskError::Gone { .. })));
}

#[tokio::test]
async fn a_closed_mailbox_releases_memory_only_after_its_fence() {
    let bed = Bed::new().await;
    let lane = bed.device.timeline();
    let backed = async |generation| {
        let lease = bed.lease(&owner(generation), Bytes::mib(2)).await.expect("the budget has memory for a lease");
        let segment =
            Segment::reserve(bed.device.clone(), Bytes::mib(2), lease).expect("the addresses can be reserved");
        segment.back_to(Bytes::mib(2)).expect("the segment is backed");
        segment
    };
    let (known, posted, late) = (backed(0).await, backed(0).await, backed(0).await);
    let step = lane.issue();
    drop(known);
    bed.snapshot().await; // The actor has read the note about `known`.
    bed.kill().await;
    drop(posted);
    bed.mailbox.close();
    drop(late);
    assert_eq!(bed.device.counts().backed, Bytes::mib(6), "the device still uses the bytes");
    lane.complete(step);
    // The handle `bed.budget` still exists, which must not delay the return of the memory.
    let all_memory_returned = async {
        while !bed.device.counts().backed.is_zero() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), all_memory_returned)
        .await
        .expect("the bytes are returned");
    assert_eq!(bed.device.counts().reservations, 0);
}

#[tokio::test]
async fn a_budgets_successor_unbacks_memory_that_its_predecessor_backed() {
    let mut bed = Bed::new().await;
    let lease = bed.lease(&owner(0), Bytes::mib(2)).await.expect("the budget has memory for a lease");
    let device: Arc<dyn Device> = bed.device.clone();
    let segment = Segment::reserve(device, Bytes::mib(2), lease).expect("the addresses can be reserved");
    segment.back_to(Bytes::mib(2)).expect("the segment is backed");
    bed.snapshot().await; // The note about the segment has been read.
    bed.kill().await;
    bed.succeed().await;
    bed.budget.clear(owner(0)).await.expect("the budget answers");
    assert_eq!(bed.device.counts().backed, Bytes::ZERO, "bytes that are free in the ledger are not backed");
    drop(segment);
    assert!(bed.snapshot().await.leases.is_empty());
}

#[tokio::test]
async fn a_budgets_successor_waits_for_the_fences_of_leases() {
    let mut bed = Bed::new().await;
    let lane = bed.device.timeline();
    let lease = bed.lease(&owner(0), Bytes::mib(2)).await.expect("the budget has memory for a lease");
    let step = lane.issue();
    let clearing = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.clear(owner(0)).await }
    });
    while bed.snapshot().await.leases.iter().all(|line| line.state != LeaseState::Revoking) {
        tokio::task::yield_now().await;
    }
    bed.kill().await;
    bed.succeed().await;
    let ledger = bed.snapshot().await;
    assert_eq!(ledger.granted, Bytes::mib(2), "the device still uses the bytes: {ledger}");
    lane.complete(step);
    clearing.await.expect("the task does not panic").expect("the successor answers");
    assert!(bed.snapshot().await.leases.is_empty());
    drop(lease);
}

#[tokio::test]
async fn a_budgets_successor_keeps_gates_frozen_and_lease_numbers_unique() {
    let mut bed = Bed::new().await;
    let kept = bed.lease(&owner(0), Bytes::mib(2)).await.expect("the budget has memory for a lease");
    let gone = bed.lease(&owner(0), Bytes::mib(1)).await.expect("the budget has memory for a lease");
    let number = gone.id();
    bed.budget.clear(Owner::new("nobody", 0)).await.expect("the budget answers");
    bed.budget.move_gate(Label::from("demo"), Gate::Frozen).await.expect("the budget answers").expect("the gate moves");
    drop(gone);
    bed.snapshot().await;
    bed.kill().await;
    bed.succeed().await;
    assert_eq!(bed.snapshot().await.gates[0].gate, Gate::Frozen);
    let mine = bed.budget.lease(Class::external("mine"), Bytes::mib(1)).await.expect("tenants get leases");
    assert!(mine.id() > number, "a late return of lease {number} must not release a new lease");
    drop((kept, mine));
}

/// Blocks calls of a device until this value is dropped. A failing test also drops this value and
/// therefore does not hang.
struct Held(Arc<HostDevice>);

impl Held {
    fn calls(device: &Arc<HostDevice>) -> Held {
        device.hold_calls();
        Held(device.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.let_calls_pass();
    }
}

/// Waits until the device blocks in a call, as it would while a whole GPU is unmapped.
async fn until_held(device: &HostDevice) {
    while device.counts().held_calls == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_budget_and_its_successor_answer_during_pending_reclaims() {
    let mut bed = Bed::new().await;
    let lease = bed.lease(&owner(0), Bytes::mib(8)).await.expect("the budget has memory for a lease");
    let device: Arc<dyn Device> = bed.device.clone();
    let segment = Segment::reserve(device, Bytes::mib(8), lease).expect("the addresses can be reserved");
    segment.back_to(Bytes::mib(8)).expect("the segment is backed");
    bed.snapshot().await; // The note about the segment has been read.
    let held = Held::calls(&bed.device);
    let clearing = tokio::spawn({
        let budget = bed.budget.clone();
        async move { budget.clear(owner(0)).await }
    });
    until_held(&bed.device).await;
    let ledger = bed.snapshot().await;
    assert_eq!(ledger.granted, Bytes::mib(8), "no byte counts as free before the device has reclaimed it: {ledger}");
    let mine =
        bed.budget.lease(Class::external("mine"), Bytes::mib(1)).await.expect("other owners get leases meanwhile");
    bed.kill().await;
    bed.succeed().await;
    let ledger = bed.snapshot().await;
    assert_eq!(ledger.granted, Bytes::mib(9), "the successor waits for the bytes too: {ledger}");
    assert!(!clearing.is_finished(), "the owner is not cleared yet");
    drop(held);
    clearing.await.expect("the task does not panic").expect("the successor answers");
    assert_eq!(bed.device.counts().backed, Bytes::ZERO);
    assert_eq!(bed.snapshot().await.granted, Bytes::mib(1));
    drop((segment, mine));
}

#[tokio::test]
async fn unleased_bytes_are_counted_before_the_next_grant() {
    let mut bed = Bed::new().await;
    assert_eq!(bed.device.overhead_grows(Bytes::mib(10)), Bytes::mib(10));
    // 50 MiB are left: 64 MiB minus 4 MiB for the canary and 10 MiB of overhead.
    let error = bed
        .budget
        .try_lease(Class::external("mine"), Bytes::mib(51))
        .await
        .expect_err("the request is 1 MiB too large");
    assert!(
        matches!(error, LeaseError::Refused(Refusal::TooLarge { short_by, .. }) if short_by == Bytes::mib(1)),
        "{error:?}"
    );
    let lease =
        bed.budget.try_lease(Class::external("mine"), Bytes::mib(50)).await.expect("the remaining bytes can be leased");
    let ledger = bed.snapshot().await;
    assert_eq!((ledger.overhead, ledger.foreign, ledger.deficit), (Bytes::mib(10), Bytes::ZERO, Bytes::ZERO));
    bed.kill().await;
    bed.device.overhead_grows(Bytes::mib(2));
    bed.succeed().await;
    let ledger = bed.snapshot().await;
    assert_eq!(
        (ledger.overhead, ledger.granted),
        (Bytes::mib(12), Bytes::mib(50)),
        "a successor knows the overhead too: {ledger}"
    );
    drop(lease);
}

#[tokio::test]
async fn foreign_bytes_are_known_before_the_first_grant_and_on_request() {
    let mut bed = Bed::new().await;
    bed.kill().await;
    bed.device.foreign_takes(Bytes::mib(20));
    bed.succeed().await;
    assert_eq!(bed.snapshot().await.foreign, Bytes::mib(20));
    let error = bed
        .budget
        .try_lease(Class::external("mine"), Bytes::mib(41))
        .await
        .expect_err("another process holds the bytes");
    assert!(
        matches!(error, LeaseError::Refused(Refusal::Short { short_by, .. }) if short_by == Bytes::mib(1)),
        "{error:?}"
    );
    bed.device.foreign_gives_back(Bytes::mib(15));
    assert_eq!(bed.snapshot().await.foreign, Bytes::mib(20), "the budget has not measured the device since");
    assert_eq!(bed.budget.measure().await.expect("the budget answers").foreign, Bytes::mib(5));
    bed.budget
        .try_lease(Class::external("mine"), Bytes::mib(41))
        .await
        .expect("the other process has returned its bytes");
}

#[tokio::test]
async fn the_budget_frees_the_leases_of_a_lost_device() {
    let bed = Bed::new().await;
    let lease = bed.lease(&owner(0), Bytes::mib(8)).await.expect("the budget has memory for a lease");
    let device: Arc<dyn Device> = bed.device.clone();
    let segment = Segment::reserve(device, Bytes::mib(8), lease).expect("the addresses can be reserved");
    segment.back_to(Bytes::mib(8)).expect("the segment is backed");
    bed.device.lose("a script says so");
    bed.budget.clear(owner(0)).await.expect("the budget answers");
    bed.budget.measure().await.expect("the budget answers");
    assert!(bed.snapshot().await.leases.is_empty());
    assert_eq!(bed.device.counts().backed, Bytes::ZERO);
    drop(segment);
}
