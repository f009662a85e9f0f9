//! Pure: return of free memory to the leases that gave it up.
//!
//! Leases give up memory immediately and get it back after a delay. The amount returned is the
//! smallest number of bytes that was free at any probe within `patience`. Enough memory for the
//! peak of a process that repeatedly takes and frees memory therefore stays free, and no sequence
//! is preempted at each new peak.

use std::{collections::VecDeque, time::Duration};

use bursar_budgets::{Bytes, LeaseId};

/// Observations of one probe of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Time since the budget actor started.
    pub at: Duration,
    /// Bytes that a lease could get without using any of the canary.
    pub available: Bytes,
    /// `true` if something takes precedence over growth: leases, overhead, foreign memory and the
    /// canary together exceed the device (rule 1 of `bursar_budgets`), part of the canary is
    /// missing, a lease waits, or a model is being sized.
    pub is_pressed: bool,
}

/// A lease below its largest size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanting {
    pub lease: LeaseId,
    pub bytes: Bytes,
    /// The lease's size at READY.
    pub most: Bytes,
    /// The lease grows in multiples of this size.
    pub step: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    pub lease: LeaseId,
    /// The size that the lease may grow to.
    pub to: Bytes,
}

/// History of free bytes within `patience`.
#[derive(Clone, Debug)]
pub struct Regrowth {
    patience: Duration,
    /// Time of the first probe after the last probe under pressure.
    since: Option<Duration>,
    /// Probes within `patience`, in increasing order of free bytes, so the first is the minimum. A
    /// probe is dropped if a later probe found the same number of free bytes or fewer. Bytes that
    /// were offered after a probe are subtracted from that probe's bytes.
    least: VecDeque<(Duration, Bytes)>,
}

impl Regrowth {
    pub fn new(patience: Duration) -> Self {
        Regrowth { patience, since: None, least: VecDeque::new() }
    }

    /// Records a probe. Returns the leases that may grow, in the order of `wanting`.
    pub fn offers(&mut self, probe: Probe, wanting: &[Wanting]) -> Vec<Offer> {
        if probe.is_pressed {
            self.forget();
            return Vec::new();
        }
        let since = *self.since.get_or_insert(probe.at);
        while self.least.back().is_some_and(|(_, bytes)| *bytes >= probe.available) {
            self.least.pop_back();
        }
        self.least.push_back((probe.at, probe.available));
        let begins = probe.at.saturating_sub(self.patience);
        while self.least.front().is_some_and(|(at, _)| *at < begins) {
            self.least.pop_front();
        }
        if probe.at - since < self.patience {
            return Vec::new();
        }
        let mut left = self.least.front().map_or(Bytes::ZERO, |(_, bytes)| *bytes);
        let mut offers = Vec::new();
        for Wanting { lease, bytes, most, step } in wanting {
            let more = most.saturating_sub(*bytes).min(left).round_down(*step);
            if !more.is_zero() {
                left -= more;
                offers.push(Offer { lease: *lease, to: *bytes + more });
            }
        }
        // The offered bytes are no longer free, so they are subtracted from all earlier probes.
        // Memory that becomes free later is offered only after it was free for all of `patience`.
        let spent = self.least.front().map_or(Bytes::ZERO, |(_, bytes)| *bytes) - left;
        self.least.iter_mut().for_each(|(_, bytes)| *bytes -= spent);
        offers
    }

    fn forget(&mut self) {
        self.since = None;
        self.least.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A case: its name, the free bytes at each second (`None` under pressure), the lease's size,
    /// and the offers with their times.
    type Row<'r> = (&'r str, Vec<Option<u64>>, u64, &'r [(u64, u64)]);

    const SECOND: Duration = Duration::from_secs(1);
    const STEP: Bytes = Bytes(10);

    fn kv(bytes: u64) -> Wanting {
        Wanting { lease: LeaseId(1), bytes: Bytes(bytes), most: Bytes(1000), step: STEP }
    }

    /// Probes the free bytes once a second. Returns the second of each offer and the size offered.
    fn offered(free: impl IntoIterator<Item = Option<u64>>, wanting: Wanting) -> Vec<(u64, u64)> {
        let mut regrowth = Regrowth::new(10 * SECOND);
        let mut offers = Vec::new();
        for (second, free) in (0..).zip(free) {
            let (available, is_pressed) = (Bytes(free.unwrap_or(0)), free.is_none());
            let probe = Probe { at: second as u32 * SECOND, available, is_pressed };
            offers.extend(regrowth.offers(probe, &[wanting]).into_iter().map(|offer| (second, offer.to.0)));
        }
        offers
    }

    #[test]
    fn bytes_are_offered_only_after_ten_seconds_free() {
        let table: [Row<'_>; 10] = [
            ("memory stays free long enough", vec![Some(200); 11], 500, &[(10, 700)]),
            ("memory is not free long enough", vec![Some(200); 10], 500, &[]),
            ("whole steps only", vec![Some(209); 11], 500, &[(10, 700)]),
            ("less than a step", vec![Some(9); 30], 500, &[]),
            ("never above the stressed size", vec![Some(900); 11], 500, &[(10, 1000)]),
            ("the lease already has its largest size", vec![Some(900); 30], 1000, &[]),
            (
                "the smallest number of free bytes counts",
                [vec![Some(200); 5], vec![Some(50)], vec![Some(300); 5]].concat(),
                500,
                &[(10, 550)],
            ),
            (
                "pressure restarts the wait",
                [vec![Some(200); 9], vec![None], vec![Some(200); 11]].concat(),
                500,
                &[(20, 700)],
            ),
            ("each offer restarts the wait", vec![Some(200); 22], 500, &[(10, 700), (21, 700)]),
            (
                "an offer does not delay the offer of memory that became free later",
                [vec![Some(50); 8], vec![Some(400); 2], vec![Some(390)], vec![Some(340); 8]].concat(),
                500,
                &[(10, 550), (18, 840)],
            ),
        ];
        for (story, free, bytes, expected) in table {
            assert_eq!(offered(free, kv(bytes)), expected, "{story}");
        }
    }

    #[test]
    fn memory_taken_again_within_ten_seconds_is_not_offered() {
        let flapping = (0..120).map(|second| Some(if second / 5 % 2 == 0 { 400 } else { 0 }));
        assert_eq!(offered(flapping, kv(500)), []);
        let partly = (0..12).map(|second| Some(if second / 5 % 2 == 0 { 400 } else { 120 }));
        assert_eq!(offered(partly, kv(500)), [(10, 620)], "bytes that the other process never takes are offered");
        let under_pressure = (0..120).map(|second| (second / 5 % 2 == 0).then_some(400));
        assert_eq!(offered(under_pressure, kv(500)), []);
    }

    #[test]
    fn free_bytes_are_offered_once_starting_with_the_first_cache() {
        let mut regrowth = Regrowth::new(SECOND);
        let both = [kv(800), Wanting { lease: LeaseId(2), ..kv(900) }];
        let probe = |at| Probe { at, available: Bytes(250), is_pressed: false };
        assert!(regrowth.offers(probe(Duration::ZERO), &both).is_empty());
        let offers = regrowth.offers(probe(SECOND), &both);
        let offer = |lease, to| Offer { lease: LeaseId(lease), to: Bytes(to) };
        assert_eq!(offers, [offer(1, 1000), offer(2, 950)]);
    }

    proptest! {
        /// Compares the offers with a direct search over all earlier probes.
        #[test]
        fn an_offer_is_the_least_free_memory_of_all_probes(
            seen in proptest::collection::vec(prop_oneof![1 => Just(None), 12 => (0u64..60).prop_map(Some)], 1..80),
        ) {
            let mut regrowth = Regrowth::new(4 * SECOND);
            let (mut begins, mut unspent) = (0, seen.clone());
            for (second, free) in seen.iter().enumerate() {
                let probe = Probe {
                    at: second as u32 * SECOND,
                    available: Bytes(free.unwrap_or(0)),
                    is_pressed: free.is_none(),
                };
                let offers = regrowth.offers(probe, &[kv(0)]);
                let is_due = free.is_some() && second >= begins + 4;
                let least = is_due.then(|| unspent[second - 4..=second].iter().flatten().min()).flatten();
                let steady = least.map_or(0, |least| least / 10 * 10);
                prop_assert_eq!(offers.first().map_or(0, |offer| offer.to.0), steady, "second {}", second);
                unspent[begins..=second].iter_mut().flatten().for_each(|free| *free = free.saturating_sub(steady));
                if free.is_none() {
                    begins = second + 1;
                }
            }
        }
    }
}
