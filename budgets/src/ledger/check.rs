//! What must be true of a ledger before and after every step.

use super::{Ledger, Memory, State, Wish};
use crate::Bytes;

impl Ledger {
    /// Asserts rule 1 and what else takes constant time: in every build, before and after every step.
    pub(super) fn check_accounts(&self) {
        for memory in [Memory::Device, Memory::Host] {
            let account = self.account(memory);
            assert!(account.canary <= account.canary_wanted, "no more is kept than is wanted");
            if let Some(head) = self.queue(memory).iter().next() {
                assert!(head.bytes > account.available(), "{} waits for what is there", head.id);
            }
        }
        // Rule 1, or the alarm has been raised.
        assert_eq!(self.device.deficit(), self.announced_deficit, "rule 1 is true, or was said not to be");
        assert!(self.host.deficit().is_zero(), "no more host memory is leased than there is");
    }

    /// Audits all books, which takes time for each lease: in debug builds after every step, otherwise once in as many
    /// steps as there are leases, so that a step takes the same time on average however many there are.
    pub(super) fn audit_in_turn(&mut self) {
        self.unaudited_steps += 1;
        if cfg!(debug_assertions) || self.unaudited_steps > self.leases.len() {
            self.unaudited_steps = 0;
            self.audit();
        }
    }

    /// Asserts that the books agree with each other.
    fn audit(&self) {
        for memory in [Memory::Device, Memory::Host] {
            let held: Bytes =
                self.holdings().filter(|holding| holding.class.memory() == memory).map(|holding| holding.bytes).sum();
            assert_eq!(self.account(memory).granted, held, "the sum of all {memory:?} leases is what is granted");
        }
        let by_owner: usize = self.owners.values().map(|leases| leases.len()).sum();
        assert_eq!(by_owner, self.leases.len(), "each lease is in the book of its owner");
        for entry in self.entries() {
            let holding = &entry.holding;
            assert!(holding.id < self.next_lease, "numbers of leases are new");
            let of_owner = self.owners.get(&holding.owner);
            assert!(of_owner.is_some_and(|leases| leases.contains(&holding.id)), "{} is its owner's", holding.id);
            let dead = self.dead.get(&holding.owner.name);
            if dead.is_some_and(|dead| holding.owner.generation <= *dead) {
                assert_eq!(entry.state, State::Revoking, "the dead hold nothing");
            }
            if let State::Shrinking { to, .. } = entry.state {
                assert!(to < holding.bytes, "a shrinking lease gets smaller");
            }
        }
        for waiting in self.waiting() {
            if let Wish::Grow { lease, to } = waiting.wish {
                let entry = self.leases.get(&lease).expect("only a lease that is held waits to grow");
                assert_eq!(entry.state, State::Held, "only a lease that is held waits to grow");
                assert_eq!(to, entry.holding.bytes + waiting.bytes, "growth is the difference");
            }
        }
    }
}
