//! Pure: lending of KV cache memory between models (ADR 5).
//!
//! A model's share is the size of its KV cache at READY. While a model has no requests, it lends
//! everything above its floor to models whose requests wait for blocks. The model gets its share
//! back when it has requests again. While a lease for user code or for a starting model waits, as
//! many borrowed bytes as the lease lacks are called back. If that is not enough, idle models give
//! up memory above their floor.

use std::{collections::BTreeMap, time::Duration};

use bursar_budgets::{Bytes, LeaseId};

use super::{KvDemand, ResizeOrder};

/// A KV cache lease that may lend and borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lendable {
    pub lease: LeaseId,
    pub bytes: Bytes,
    /// The lease never shrinks below this size.
    pub floor: Bytes,
    /// The lease's size at READY.
    pub share: Bytes,
    /// The largest size that the lease can use: the bytes of its reserved addresses.
    pub limit: Bytes,
    /// The lease grows in multiples of this size.
    pub step: Bytes,
    pub need: KvDemand,
}

impl Lendable {
    fn borrowed(&self) -> Bytes {
        self.bytes.saturating_sub(self.share)
    }

    fn missing(&self) -> Bytes {
        self.share.saturating_sub(self.bytes)
    }

    /// Bytes that this lease would give up for a waiting lease: everything above its floor if its
    /// model has no requests, and otherwise only its borrowed bytes.
    pub fn would_give(&self) -> Bytes {
        let keeps = if self.need == KvDemand::Idle { self.floor } else { self.share };
        self.bytes.saturating_sub(keeps)
    }
}

/// Free memory, and the demand for it by other leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headroom {
    pub at: Duration,
    /// Bytes that a new lease could get now.
    pub available: Bytes,
    /// Bytes by which the free memory falls short of the first waiting lease.
    pub awaited: Bytes,
    /// `true` if no lease may grow, because another process takes memory or a model is being sized.
    pub is_pressed: bool,
}

/// The leases that lend, and the time since which each model has been idle.
#[derive(Clone, Debug)]
pub struct Lending {
    /// A model must have been idle for this long before it lends.
    idle: Duration,
    /// After a model has called its share back, it does not lend again for this long.
    patience: Duration,
    idle_since: BTreeMap<LeaseId, Duration>,
    /// Leases that were ordered to lend. The value is the time at which the lease had its whole
    /// share back and its model had requests again. Until then, the value is `None`. The entry is
    /// kept for `idle` after that time, because the model may still be executing an earlier order
    /// to shrink.
    lenders: BTreeMap<LeaseId, Option<Duration>>,
    /// The last time at which the model of each lender needed its share back.
    recalled: BTreeMap<LeaseId, Duration>,
}

impl Lending {
    /// Creates the state in which no lease lends yet.
    pub fn new(idle: Duration, patience: Duration) -> Self {
        Lending { idle, patience, idle_since: BTreeMap::new(), lenders: BTreeMap::new(), recalled: BTreeMap::new() }
    }

    /// Returns `true` if this lease is lending. A lending lease may be smaller than its share.
    pub fn lends(&self, lease: LeaseId) -> bool {
        self.lenders.contains_key(&lease)
    }

    /// Borrowed bytes that must be returned, because their lenders need them or no longer exist.
    pub fn called(&self, leases: &[Lendable]) -> Bytes {
        let borrowed: Bytes = leases.iter().map(Lendable::borrowed).sum();
        borrowed.saturating_sub(self.lent_by_idle(leases))
    }

    fn lent_by_idle(&self, leases: &[Lendable]) -> Bytes {
        let lends = |lease: &&Lendable| self.lends(lease.lease) && lease.need == KvDemand::Idle;
        leases.iter().filter(lends).map(Lendable::missing).sum()
    }

    /// Returns the orders for the current state. All sizes are absolute, so a later call may repeat
    /// them.
    pub fn orders(&mut self, headroom: Headroom, leases: &[Lendable]) -> Vec<(LeaseId, ResizeOrder)> {
        self.note(headroom.at, leases);
        let mut kept: BTreeMap<LeaseId, Bytes> = BTreeMap::new();
        let (mut called, mut awaited) = (self.called(leases), headroom.awaited);
        let mut borrowers: Vec<_> = leases.iter().filter(|lease| !lease.borrowed().is_zero()).collect();
        borrowers.sort_unstable_by_key(|lease| std::cmp::Reverse((lease.borrowed(), lease.lease)));
        for lease in borrowers {
            let of_lenders = called.min(lease.borrowed());
            let of_waiting = awaited.min(lease.borrowed() - of_lenders);
            (called, awaited) = (called - of_lenders, awaited - of_waiting);
            kept.insert(lease.lease, lease.bytes - of_lenders - of_waiting);
        }
        // Free memory goes to the waiting lease before any of it is lent.
        let may_borrow = headroom.awaited.is_zero();
        let mut free = if headroom.is_pressed { Bytes::ZERO } else { headroom.available };
        let mut grown = Vec::new();
        let mut grow = |lease: &Lendable, by: Bytes, free: &mut Bytes| {
            let by = by.min(*free).round_down(lease.step);
            if !by.is_zero() {
                *free -= by;
                grown.push((lease.lease, ResizeOrder::MayGrow { to: lease.bytes + by }));
            }
        };
        for lease in leases.iter().filter(|lease| self.lends(lease.lease) && lease.need != KvDemand::Idle) {
            grow(lease, lease.missing(), &mut free);
        }
        let is_waiting = |lease: &&Lendable| lease.need == KvDemand::WaitingForBlocks && lease.missing().is_zero();
        let mut waiting: Vec<_> = leases.iter().filter(is_waiting).filter(|lease| lease.bytes < lease.limit).collect();
        waiting.sort_unstable_by_key(|lease| (lease.borrowed(), lease.lease));
        let borrowed = leases.iter().map(Lendable::borrowed).sum();
        let mut left = self.lent_by_idle(leases).saturating_sub(borrowed);
        for (place, lease) in waiting.iter().enumerate().filter(|_| may_borrow) {
            let part = (left / (waiting.len() - place) as u64).min(lease.limit - lease.bytes);
            let before = free;
            grow(lease, part, &mut free);
            left -= before - free;
        }
        for lease in leases.iter().filter(|lease| self.may_lend(lease.lease, headroom.at)) {
            let kept = kept.entry(lease.lease).or_insert(lease.bytes);
            let spare = kept.saturating_sub(lease.floor);
            let part = if waiting.is_empty() { awaited.min(spare) } else { spare };
            awaited = awaited.saturating_sub(part);
            *kept -= part;
        }
        let is_less = |(lease, to): &(LeaseId, Bytes)| leases.iter().any(|of| of.lease == *lease && *to < of.bytes);
        let mut orders: Vec<_> =
            kept.into_iter().filter(is_less).map(|(lease, to)| (lease, ResizeOrder::GiveUp { to })).collect();
        orders.append(&mut grown);
        if !waiting.is_empty() {
            let idle = self.idle_since.keys().copied().filter(|lease| self.may_lend(*lease, headroom.at));
            let lenders: Vec<_> = idle.collect();
            self.lenders.extend(lenders.into_iter().map(|lease| (lease, None)));
        }
        orders
    }

    fn may_lend(&self, lease: LeaseId, at: Duration) -> bool {
        let is_idle = self.idle_since.get(&lease).is_some_and(|since| at.saturating_sub(*since) >= self.idle);
        is_idle && self.recalled.get(&lease).is_none_or(|called| at.saturating_sub(*called) >= self.patience)
    }

    fn note(&mut self, at: Duration, leases: &[Lendable]) {
        let of = |lease: &LeaseId| leases.iter().find(|lendable| lendable.lease == *lease);
        self.idle_since.retain(|lease, _| of(lease).is_some_and(|lease| lease.need == KvDemand::Idle));
        self.recalled.retain(|lease, _| of(lease).is_some());
        for lease in leases {
            let needs_its_own = self.lenders.contains_key(&lease.lease) && lease.need != KvDemand::Idle;
            if needs_its_own {
                self.recalled.insert(lease.lease, at);
            }
            if lease.need == KvDemand::Idle {
                self.idle_since.entry(lease.lease).or_insert(at);
            }
        }
        let idle = self.idle;
        self.lenders.retain(|lease, whole_since| {
            let Some(of) = of(lease) else { return false };
            *whole_since = (of.need != KvDemand::Idle && of.missing().is_zero()).then(|| whole_since.unwrap_or(at));
            whole_since.is_none_or(|since| at.saturating_sub(since) < idle)
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(number: u64, bytes: u64, need: KvDemand) -> Lendable {
        Lendable {
            lease: LeaseId(number),
            bytes: Bytes(bytes),
            floor: Bytes(10),
            share: Bytes(100),
            limit: Bytes(1000),
            step: Bytes(1),
            need,
        }
    }

    fn headroom(seconds: u32, available: u64) -> Headroom {
        Headroom { at: seconds * SECOND, available: Bytes(available), awaited: Bytes::ZERO, is_pressed: false }
    }

    fn give_up(number: u64, to: u64) -> (LeaseId, ResizeOrder) {
        (LeaseId(number), ResizeOrder::GiveUp { to: Bytes(to) })
    }

    fn may_grow(number: u64, to: u64) -> (LeaseId, ResizeOrder) {
        (LeaseId(number), ResizeOrder::MayGrow { to: Bytes(to) })
    }

    #[test]
    fn an_idle_model_lends_memory_until_it_has_requests_again() {
        let mut lending = Lending::new(SECOND, 10 * SECOND);
        let (idle, waiting) =
            (|bytes| lease(1, bytes, KvDemand::Idle), |bytes| lease(2, bytes, KvDemand::WaitingForBlocks));
        assert_eq!(lending.orders(headroom(0, 0), &[idle(100), waiting(100)]), [], "the lender became idle just now");
        assert_eq!(lending.orders(headroom(1, 0), &[idle(100), waiting(100)]), [give_up(1, 10)]);
        assert_eq!(lending.orders(headroom(1, 90), &[idle(10), waiting(100)]), [may_grow(2, 190)]);
        assert_eq!(lending.orders(headroom(2, 0), &[idle(10), waiting(190)]), [], "nothing more can be lent");
        let (asked, sated) = (|bytes| lease(1, bytes, KvDemand::Busy), |bytes| lease(2, bytes, KvDemand::Busy));
        assert_eq!(lending.orders(headroom(3, 0), &[asked(10), waiting(190)]), [give_up(2, 100)]);
        assert_eq!(lending.orders(headroom(3, 90), &[asked(10), sated(100)]), [may_grow(1, 100)]);
        assert_eq!(lending.orders(headroom(4, 0), &[asked(100), sated(100)]), []);
        // The first model lends again only 10 s after it last needed its share.
        assert_eq!(lending.orders(headroom(6, 0), &[idle(100), waiting(100)]), []);
        assert_eq!(lending.orders(headroom(13, 0), &[idle(100), waiting(100)]), []);
        assert_eq!(lending.orders(headroom(14, 0), &[idle(100), waiting(100)]), [give_up(1, 10)]);
    }

    #[test]
    fn borrowers_take_only_lent_memory_and_return_it_after_unloads() {
        let mut lending = Lending::new(SECOND, 10 * SECOND);
        let waiting = lease(2, 100, KvDemand::WaitingForBlocks);
        assert_eq!(lending.orders(headroom(0, 500), &[lease(1, 100, KvDemand::Busy), waiting]), []);
        assert_eq!(lending.orders(headroom(9, 500), &[lease(2, 150, KvDemand::WaitingForBlocks)]), [give_up(2, 100)]);
        let gave_way = lease(1, 40, KvDemand::Busy);
        assert_eq!(
            lending.orders(headroom(9, 500), &[gave_way]),
            [],
            "memory that another process took returns by Regrowth, not by lending"
        );
    }

    #[test]
    fn idle_models_give_up_bytes_for_a_waiting_tenant() {
        let mut lending = Lending::new(SECOND, 10 * SECOND);
        let leases = [lease(1, 100, KvDemand::Idle), lease(2, 100, KvDemand::Busy), lease(3, 100, KvDemand::Idle)];
        let waits = |seconds, awaited| Headroom { awaited: Bytes(awaited), ..headroom(seconds, 0) };
        assert_eq!(lending.orders(waits(0, 120), &leases), []);
        assert_eq!(lending.orders(waits(1, 120), &leases), [give_up(1, 10), give_up(3, 70)]);
        assert!(!lending.lends(LeaseId(1)), "memory given to a waiting tenant is not lent");
    }

    #[test]
    fn a_waiting_lease_recalls_borrowed_memory_and_stops_new_lending() {
        let mut lending = Lending::new(SECOND, 10 * SECOND);
        let leases =
            |lender, borrower| [lease(1, lender, KvDemand::Idle), lease(2, borrower, KvDemand::WaitingForBlocks)];
        lending.orders(headroom(0, 0), &leases(100, 100));
        lending.orders(headroom(1, 0), &leases(100, 100));
        let waits = |available, awaited| Headroom { awaited: Bytes(awaited), ..headroom(2, available) };
        assert_eq!(
            lending.orders(waits(0, 30), &leases(10, 190)),
            [give_up(2, 160)],
            "the borrower gives up only the missing bytes"
        );
        assert_eq!(
            lending.orders(waits(20, 10), &leases(10, 170)),
            [give_up(2, 160)],
            "bytes that became free are not lent again"
        );
        assert_eq!(lending.orders(waits(0, 120), &leases(10, 190)), [give_up(2, 100)], "the borrower keeps its share");
        // A borrower that has become idle gives up its borrowed bytes, and then as many bytes of
        // its share as are still missing.
        let idle = [lease(1, 10, KvDemand::Idle), lease(2, 190, KvDemand::Idle)];
        lending.orders(headroom(3, 0), &idle);
        let waits = |awaited| Headroom { awaited: Bytes(awaited), ..headroom(4, 0) };
        assert_eq!(lending.orders(waits(120), &idle), [give_up(2, 70)]);
        assert_eq!(lending.orders(waits(500), &idle), [give_up(2, 10)]);
        assert_eq!(idle.map(|lease| lease.would_give()), [Bytes(0), Bytes(180)]);
        assert_eq!(leases(60, 190).map(|lease| lease.would_give()), [Bytes(50), Bytes(90)]);
    }

    #[test]
    fn two_borrowers_share_lent_memory_and_neither_grows_under_pressure() {
        let mut lending = Lending::new(Duration::ZERO, SECOND);
        let leases = |lender, first, second| {
            [
                lease(1, lender, KvDemand::Idle),
                lease(2, first, KvDemand::WaitingForBlocks),
                lease(3, second, KvDemand::WaitingForBlocks),
            ]
        };
        assert_eq!(lending.orders(headroom(5, 0), &leases(100, 100, 100)), [give_up(1, 10)]);
        let pressed = Headroom { is_pressed: true, ..headroom(5, 90) };
        assert_eq!(lending.orders(pressed, &leases(10, 100, 100)), []);
        assert_eq!(lending.orders(headroom(5, 90), &leases(10, 100, 100)), [may_grow(2, 145), may_grow(3, 145)]);
        assert_eq!(lending.orders(headroom(5, 45), &leases(10, 145, 100)), [may_grow(3, 122), may_grow(2, 168)]);
    }

    proptest! {
        /// Models that obey at once never hold more memory in total than the device has, for any
        /// sequence of demands and waiting leases. A lender has its share back as soon as its model
        /// has requests. No lease shrinks below its floor, or below its share while its model has
        /// requests.
        #[test]
        fn lent_shares_return_and_no_byte_is_held_twice(
            steps in proptest::collection::vec((0u64..3, 0usize..3, any::<bool>(), prop_oneof![Just(0), 0u64..200]), 1..60),
        ) {
            let mut lending = Lending::new(SECOND, 2 * SECOND);
            let mut leases: Vec<_> = (1..=3).map(|number| lease(number, 100, KvDemand::Idle)).collect();
            let mut has_waited = false;
            for (second, (which, need, is_pressed, wanted)) in steps.into_iter().enumerate() {
                leases[which as usize].need = KvDemand::ALL[need];
                has_waited |= wanted > 0;
                for _ in 0..4 {
                    let held: u64 = leases.iter().map(|lease| lease.bytes.0).sum();
                    let awaited = Bytes(wanted).saturating_sub(Bytes(300 - held));
                    let headroom = Headroom { is_pressed, awaited, ..headroom(second as u32, 300 - held) };
                    for (of, order) in lending.orders(headroom, &leases) {
                        let lease = leases.iter_mut().find(|lease| lease.lease == of).expect("the list has the lease");
                        match order {
                            ResizeOrder::GiveUp { to } => {
                                prop_assert!(to >= lease.floor && to < lease.bytes);
                                prop_assert!(lease.need == KvDemand::Idle || to >= lease.share);
                                lease.bytes = to;
                            }
                            ResizeOrder::MayGrow { to } => {
                                prop_assert!(lease.need != KvDemand::Idle && to > lease.bytes && to <= lease.limit);
                                prop_assert!(awaited.is_zero() || to <= lease.share, "awaited bytes are not lent");
                                lease.bytes = to;
                            }
                        }
                    }
                    let held: u64 = leases.iter().map(|lease| lease.bytes.0).sum();
                    prop_assert!(held <= 300, "{:?}", leases);
                }
                // Memory given up for a waiting lease is returned by `Regrowth`, not by lending.
                let is_due = |lease: &&Lendable| !has_waited || lending.lends(lease.lease);
                for lease in leases.iter().filter(|lease| lease.need != KvDemand::Idle).filter(is_due) {
                    prop_assert!(is_pressed || lease.missing().is_zero(), "{:?}", leases);
                }
            }
        }
    }
}
