//! The sums of one memory: how much there is, and how much each kind of use takes.

use crate::Bytes;

/// The sums of rule 1. All fields but `canary_wanted` count bytes in use or kept free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// All of this memory.
    pub total: Bytes,
    /// Held by our process outside leases.
    pub overhead: Bytes,
    /// Held by other processes.
    pub foreign: Bytes,
    /// The sum of all leases.
    pub granted: Bytes,
    /// Kept free now: all of `canary_wanted`, or less once some was given up.
    pub canary: Bytes,
    /// How much should be kept free.
    pub canary_wanted: Bytes,
}

impl Account {
    /// Neither granted, nor overhead, nor foreign, nor kept free.
    pub fn free(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary))
    }

    /// The most that a request can get now. While part of the canary is missing, the canary comes first.
    pub fn available(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary_wanted))
    }

    /// The most that one lease could ever get, with all other leases and processes gone.
    pub fn attainable(&self) -> Bytes {
        self.total.saturating_sub(self.overhead.saturating_add(self.canary_wanted))
    }

    /// By how many bytes rule 1 is broken. Only growth of foreign or overhead can break it.
    pub fn deficit(&self) -> Bytes {
        self.spent().saturating_add(self.canary).saturating_sub(self.total)
    }

    /// How much must become free before rule 1 holds with the whole canary: at least the deficit. A neighbour can only
    /// take what is free, so while all leases are backed, what it takes reduces the canary and causes no deficit.
    pub fn owed(&self) -> Bytes {
        self.spent().saturating_add(self.canary_wanted).saturating_sub(self.total)
    }

    /// All but the canary.
    fn spent(&self) -> Bytes {
        self.granted.saturating_add(self.overhead).saturating_add(self.foreign)
    }
}
