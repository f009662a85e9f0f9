//! The ledger of a runtime on a real GPU. Without a GPU, each test prints a note and passes.

use std::time::{Duration, Instant};

use crate::gpu::{Stage, story};
use bursar_actors::{testing, tree};
use bursar_budgets::{Bytes, Class, Device, Owner, Request, Segment};

#[test]
fn the_ledger_counts_context_modules_and_other_processes() {
    story(async |Stage { runtime, device }| {
        let budget = runtime.budget();
        let started = budget.snapshot().await.expect("the budget answers");
        println!("{started}");
        let memory = device.memory().expect("the device reports its memory");
        assert_eq!(started.overhead, device.overhead());
        let unexplained = (memory.total - memory.free).saturating_sub(started.overhead + started.foreign);
        assert!(unexplained <= Bytes::mib(64), "{unexplained} are neither overhead nor foreign");
        let pinned = device.pinned(Bytes::mib(64)).expect("the host has page-locked memory");
        // The ledger cannot distinguish memory without a lease from memory of another process.
        let address = device.reserve(Bytes::gib(3)).expect("addresses");
        device.back(address, Bytes::gib(3)).expect("the device has memory");
        let seen = budget.measure().await.expect("the budget answers");
        let more = seen.foreign - started.foreign;
        assert!((Bytes::gib(3)..=Bytes::gib(3) + Bytes::mib(64)).contains(&more), "{more} more bytes are foreign");
        let asked = seen.free + Bytes::gib(1);
        budget.try_lease(Class::external("mine"), asked).await.expect_err("the memory is counted as foreign");
        device.release_reservation(address).expect("the reservation can be released");
        assert!(budget.measure().await.expect("the budget answers").foreign < started.foreign + Bytes::mib(64));
        budget.try_lease(Class::external("mine"), asked).await.expect("the memory is free again");
        let overhead = device.overhead();
        let held =
            device.with_overhead("staging", || device.pinned(Bytes::mib(1))).expect("the host has page-locked memory");
        assert_eq!(budget.snapshot().await.expect("the budget answers").overhead, device.overhead());
        println!("{} of overhead, {} of it by with_overhead", device.overhead(), device.overhead() - overhead);
        drop((pinned, held));
    });
}

#[test]
fn the_budget_answers_at_once_while_a_card_is_reclaimed() {
    story(async |Stage { runtime, device }| {
        let budget = runtime.budget();
        let free = budget.measure().await.expect("the budget answers").free;
        let owner = Owner::new("whole card", 0);
        let bytes = (free - Bytes::gib(1)).round_down(device.page());
        let request = Request::new(owner.clone(), Class::Kv, "whole card", bytes);
        let lease = testing::lease(budget, tree::LEASE_FOR_ENGINE, request, false)
            .await
            .expect("the budget has memory for a lease");
        let on = runtime.device();
        let segment = tokio::task::spawn_blocking(move || {
            let segment = Segment::reserve(on, bytes, lease).expect("addresses");
            segment.back_to(bytes).expect("the segment is backed");
            segment
        });
        let (slowest, answers, begun) = (Duration::ZERO, 0, Instant::now());
        let (slowest, answers) = ask_until(budget, slowest, answers, || segment.is_finished()).await;
        println!(
            "{bytes} backed in {:?}; {answers} snapshots meanwhile, the slowest took {slowest:?}",
            begun.elapsed()
        );
        let segment = segment.await.expect("the task does not panic");
        let begun = Instant::now();
        let clearing = tokio::spawn({
            let budget = budget.clone();
            async move { testing::clear(&budget, owner).await }
        });
        let (slowest, answers) = ask_until(budget, Duration::ZERO, 0, || clearing.is_finished()).await;
        let took = begun.elapsed();
        println!("{bytes} were returned in {took:?}; {answers} snapshots meanwhile, the slowest took {slowest:?}");
        clearing.await.expect("the task does not panic").expect("the budget answers");
        assert!(answers > 10 && slowest < took / 4, "budget questions do not wait for the device");
        assert_eq!((device.counts().backed, budget.leased_bytes()), (Bytes::ZERO, Bytes::ZERO));
        drop(segment);
    });
}

/// Measures through the budget until `is_over`. Returns the longest time that a measurement took,
/// and the number of measurements.
async fn ask_until(
    budget: &bursar_actors::budget::Budget,
    mut slowest: Duration,
    mut answers: usize,
    is_over: impl Fn() -> bool,
) -> (Duration, usize) {
    while !is_over() {
        let asked = Instant::now();
        budget.measure().await.expect("the budget answers");
        slowest = slowest.max(asked.elapsed());
        answers += 1;
        tokio::task::yield_now().await;
    }
    (slowest, answers)
}
