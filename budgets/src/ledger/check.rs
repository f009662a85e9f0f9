//! Pure: assertions that hold before and after every step of a ledger.

use super::{Ledger, Memory, RequestKind, State};
use crate::Bytes;

impl Ledger {
    /// Asserts the invariants that take constant time to check, above all rule 1: `granted +
    /// overhead + foreign + canary <= total`. All builds do this before and after every step.
    pub(super) fn check_accounts(&self) {
        for memory in [Memory::Device, Memory::Host] {
            let account = self.account(memory);
            assert!(account.canary <= account.canary_wanted, "the canary is at most its wanted size");
            if let Some(head) = self.queue(memory).iter().next() {
                assert!(head.bytes > account.available(), "{} waits only if memory is short", head.id);
            }
        }
        // Rule 1 holds, or a `Deficit` effect has announced by how many bytes it is broken.
        assert_eq!(self.device.deficit(), self.announced_deficit, "the deficit equals the announced deficit");
        assert!(self.host.deficit().is_zero(), "host leases fit the host memory");
    }

    /// Audits all maps and sums, in time proportional to the number of leases. Debug builds audit
    /// after every step. Release builds audit about once every N steps, where N is the number of
    /// leases, so that the average cost of a step is constant.
    pub(super) fn audit_periodically(&mut self) {
        let between = if cfg!(debug_assertions) { 0 } else { self.leases.len() };
        self.audit_after(between);
    }

    /// Audits if more than `steps` steps have passed since the last audit.
    fn audit_after(&mut self, steps: usize) {
        self.unaudited_steps += 1;
        if self.unaudited_steps > steps {
            self.unaudited_steps = 0;
            self.audit();
        }
    }

    /// Asserts that the maps and sums of the ledger agree with each other.
    fn audit(&self) {
        for memory in [Memory::Device, Memory::Host] {
            let held: Bytes =
                self.holdings().filter(|holding| holding.class.memory() == memory).map(|holding| holding.bytes).sum();
            assert_eq!(self.account(memory).granted, held, "granted is the sum of all {memory:?} leases");
        }
        let by_owner: usize = self.owners.values().map(|leases| leases.len()).sum();
        assert_eq!(by_owner, self.leases.len(), "each lease is listed with its owner");
        for entry in self.entries() {
            let holding = &entry.holding;
            assert!(holding.id < self.next_lease, "lease numbers are below the next number");
            let of_owner = self.owners.get(&holding.owner);
            assert!(of_owner.is_some_and(|leases| leases.contains(&holding.id)), "{} is its owner's lease", holding.id);
            let dead = self.dead.get(&holding.owner.name);
            if dead.is_some_and(|dead| holding.owner.generation <= *dead) {
                assert_eq!(entry.state, State::Revoking, "leases of a dead owner are being revoked");
            }
            if let State::Shrinking { to, .. } = entry.state {
                assert!(to < holding.bytes, "a shrinking lease gets smaller");
            }
        }
        for waiting in self.waiting() {
            if let RequestKind::Grow { lease, to } = waiting.kind {
                let entry = self.leases.get(&lease).expect("only a held lease waits to grow");
                assert_eq!(entry.state, State::Held, "only a held lease waits to grow");
                assert_eq!(to, entry.holding.bytes + waiting.bytes, "a growth waits for the size difference");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Class, Effect, Input, LeaseId, LedgerConfig, Owner, Request, RequestId, Waiting};

    const KV: LeaseId = LeaseId(1);
    const HOST: LeaseId = LeaseId(2);

    /// A ledger in which KV holds 600 of 1,000 bytes of device memory, and pictures hold 40
    /// bytes of host memory.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(LedgerConfig { host_total: Bytes(100), ..LedgerConfig::new(Bytes(1000)) });
        ask(&mut ledger, 1, Class::Kv, 600);
        ask(&mut ledger, 2, Class::Host, 40);
        ledger.audit();
        ledger
    }

    fn ask(ledger: &mut Ledger, id: u64, class: Class, bytes: u64) -> Vec<Effect> {
        let request = Request::new(Owner::new("owner", 1), class, "demo", Bytes(bytes));
        ledger.step(Input::Ask { id: RequestId(id), request, wait: true })
    }

    fn grow(ledger: &mut Ledger, to: u64) {
        let effects =
            ledger.step(Input::Resize { id: RequestId(9), lease: KV, to: Bytes(to), wait: true, passed: true });
        assert!(matches!(effects[..], [Effect::Waiting { .. }]), "{effects:?}");
    }

    #[test]
    #[should_panic(expected = "the canary is at most its wanted size")]
    fn a_canary_larger_than_wanted_stops_the_next_step() {
        let mut ledger = ledger();
        ledger.device.canary = Bytes(1);
        ledger.step(Input::Withdraw { id: RequestId(0) });
    }

    #[test]
    #[should_panic(expected = "request 3 waits only if memory is short")]
    fn waiting_although_memory_is_free_stops_the_next_step() {
        let mut ledger = ledger();
        ask(&mut ledger, 3, Class::Weights, 500);
        ledger.device.total = Bytes(1100);
        ledger.step(Input::Withdraw { id: RequestId(0) });
    }

    #[test]
    #[should_panic(expected = "the deficit equals the announced deficit")]
    fn a_deficit_that_was_not_announced_stops_the_next_step() {
        let mut ledger = ledger();
        ledger.device.total = Bytes(599);
        ledger.step(Input::Withdraw { id: RequestId(0) });
    }

    #[test]
    #[should_panic(expected = "host leases fit the host memory")]
    fn host_memory_leased_twice_stops_the_next_step() {
        let mut ledger = ledger();
        ledger.host.total = Bytes(39);
        ledger.step(Input::Withdraw { id: RequestId(0) });
    }

    #[test]
    #[should_panic(expected = "granted is the sum of all Host leases")]
    fn a_wrong_sum_fails_the_audit() {
        let mut ledger = ledger();
        ledger.host.granted = Bytes(41);
        ledger.audit_periodically();
    }

    #[test]
    #[should_panic(expected = "each lease is listed with its owner")]
    fn a_lease_listed_with_two_owners_fails_the_audit() {
        let mut ledger = ledger();
        ledger.owners.entry(Owner::new("thief", 0)).or_default().insert(KV);
        ledger.audit();
    }

    #[test]
    #[should_panic(expected = "lease 1 is its owner's lease")]
    fn an_owner_that_lists_an_unknown_lease_fails_the_audit() {
        let mut ledger = ledger();
        let of_owner = ledger.owners.get_mut(&Owner::new("owner", 1)).unwrap();
        of_owner.remove(&KV);
        of_owner.insert(LeaseId(7));
        ledger.audit();
    }

    #[test]
    #[should_panic(expected = "lease numbers are below the next number")]
    fn a_reusable_lease_number_fails_the_audit() {
        let mut ledger = ledger();
        ledger.next_lease = HOST;
        ledger.audit();
    }

    #[test]
    fn a_held_lease_of_a_dead_owner_fails_the_audit() {
        for (dead, fails) in [(0, false), (1, true), (2, true)] {
            let mut ledger = ledger();
            ledger.dead.insert("owner".into(), dead);
            let audited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ledger.audit()));
            assert_eq!(audited.is_err(), fails, "generation 1 holds a lease, and generation {dead} is dead");
        }
    }

    #[test]
    #[should_panic(expected = "a shrinking lease gets smaller")]
    fn a_shrink_to_the_same_size_fails_the_audit() {
        let mut ledger = ledger();
        let entry = ledger.leases.get_mut(&KV).unwrap();
        entry.state = State::Shrinking { to: Bytes(600), request: RequestId(3) };
        ledger.audit();
    }

    #[test]
    fn a_shrink_to_a_smaller_size_passes_the_audit() {
        let mut ledger = ledger();
        let entry = ledger.leases.get_mut(&KV).unwrap();
        entry.state = State::Shrinking { to: Bytes(599), request: RequestId(3) };
        ledger.audit();
    }

    #[test]
    #[should_panic(expected = "only a held lease waits to grow")]
    fn a_revoked_lease_that_waits_to_grow_fails_the_audit() {
        let mut ledger = ledger();
        ask(&mut ledger, 3, Class::Weights, 300);
        grow(&mut ledger, 900);
        ledger.leases.get_mut(&KV).unwrap().state = State::Revoking;
        ledger.audit();
    }

    #[test]
    #[should_panic(expected = "a growth waits for the size difference")]
    fn a_waiting_growth_of_the_wrong_size_fails_the_audit() {
        let mut ledger = ledger();
        ask(&mut ledger, 3, Class::Weights, 300);
        let kind = RequestKind::Grow { lease: KV, to: Bytes(900) };
        let waiting = Waiting { id: RequestId(9), priority: Default::default(), bytes: Bytes(301), kind };
        ledger.device_queue.push(waiting).unwrap();
        ledger.audit();
    }

    #[test]
    fn an_audit_runs_every_n_steps() {
        let mut ledger = ledger();
        ledger.audit_after(0);
        ledger.host.granted = Bytes(41);
        ledger.audit_after(2);
        ledger.audit_after(2);
        ledger.host.granted = Bytes(40);
        ledger.audit_after(2); // This step audits.
        ledger.host.granted = Bytes(41);
        ledger.audit_after(2);
        ledger.audit_after(2);
        let third = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ledger.audit_after(2)));
        assert!(third.is_err(), "the third step audits the ledger");
    }
}
