//! What must be true of a ledger before and after every step.

use super::{Ledger, Memory, State, Wish};
use crate::Bytes;

impl Ledger {
    /// Asserts the books. A few hundred additions at most: cheap enough for release builds.
    pub(super) fn check(&self) {
        for memory in [Memory::Device, Memory::Host] {
            let held: Bytes =
                self.holdings().filter(|holding| holding.class.memory() == memory).map(|holding| holding.bytes).sum();
            let account = self.account(memory);
            assert_eq!(account.granted, held, "the sum of all {memory:?} leases is what is granted");
            assert!(account.canary <= account.canary_wanted, "no more is kept than is wanted");
            if let Some(head) = self.queue(memory).iter().next() {
                assert!(head.bytes > account.available(), "{} waits for what is there", head.id);
            }
        }
        // Rule 1, or the alarm has been raised.
        assert_eq!(self.device.deficit(), self.announced_deficit, "rule 1 is true, or was said not to be");
        assert!(self.host.deficit().is_zero(), "no more host memory is leased than there is");
        for entry in self.entries() {
            assert!(entry.holding.id < self.next_lease, "numbers of leases are new");
            let dead = self.dead.get(&entry.holding.owner.name);
            if dead.is_some_and(|dead| entry.holding.owner.generation <= *dead) {
                assert_eq!(entry.state, State::Revoking, "the dead hold nothing");
            }
            if let State::Shrinking { to, .. } = entry.state {
                assert!(to < entry.holding.bytes, "a shrinking lease gets smaller");
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
