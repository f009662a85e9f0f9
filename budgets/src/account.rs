//! One memory's books: what there is, and who has how much of it.

use crate::Bytes;

/// The sums of rule 1. Everything but `canary_wanted` is bytes that are in use or kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// All there is.
    pub total: Bytes,
    /// Ours, but under no lease.
    pub overhead: Bytes,
    /// Other processes'.
    pub foreign: Bytes,
    /// The sum of all leases.
    pub granted: Bytes,
    /// Kept free of use now: all of `canary_wanted`, or nothing after it was given up.
    pub canary: Bytes,
    /// What should be kept.
    pub canary_wanted: Bytes,
}

impl Account {
    /// What is neither granted nor spent nor kept.
    pub fn free(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary))
    }

    /// What an ask can get. While the canary is owed, it comes first: nothing is granted out of what it needs.
    pub fn available(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary_wanted))
    }

    /// The most that one lease could ever get: with every other lease and process gone.
    pub fn attainable(&self) -> Bytes {
        self.total.saturating_sub(self.overhead.saturating_add(self.canary_wanted))
    }

    /// By how much rule 1 is untrue; only growth from outside (foreign, overhead) can bring that.
    pub fn deficit(&self) -> Bytes {
        self.spent().saturating_add(self.canary).saturating_sub(self.total)
    }

    /// What has to become free for rule 1 to be true with the whole canary: never less than the deficit. A neighbour can
    /// only take what is free, so where all leases are backed it shows here, as the canary's loss, and not as a deficit.
    pub fn owed(&self) -> Bytes {
        self.spent().saturating_add(self.canary_wanted).saturating_sub(self.total)
    }

    /// Without the canary.
    fn spent(&self) -> Bytes {
        self.granted.saturating_add(self.overhead).saturating_add(self.foreign)
    }
}
