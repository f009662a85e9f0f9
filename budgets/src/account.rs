//! Memory totals by kind of use, for device or host memory.

use crate::Bytes;

/// The terms of rule 1 (see the crate docs). All fields but `canary_wanted` count bytes in
/// use or kept free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub total: Bytes,
    /// Held by our process outside leases.
    pub overhead: Bytes,
    /// Held by other processes.
    pub foreign: Bytes,
    pub granted: Bytes,
    /// Kept free now: all of `canary_wanted`, or less once some was given up.
    pub canary: Bytes,
    /// The configured size of the canary.
    pub canary_wanted: Bytes,
}

impl Account {
    /// Bytes that are neither granted, overhead, foreign nor part of the canary.
    pub fn free(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary))
    }

    /// The most that a request can get now. A canary that was given up is restored
    /// before anything is granted.
    pub fn available(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary_wanted))
    }

    /// The most that one lease could ever get, if all other leases and other processes were gone.
    pub fn attainable(&self) -> Bytes {
        self.total.saturating_sub(self.overhead.saturating_add(self.canary_wanted))
    }

    /// By how many bytes rule 1 is broken. Only growth of foreign or overhead can break it.
    pub fn deficit(&self) -> Bytes {
        self.spent().saturating_add(self.canary).saturating_sub(self.total)
    }

    /// How much must become free before rule 1 holds with the whole canary: at least the deficit.
    /// Another process can only take memory that is free on the device. While all leases are fully
    /// backed, it can therefore shrink the canary, but cause no deficit.
    pub fn owed(&self) -> Bytes {
        self.spent().saturating_add(self.canary_wanted).saturating_sub(self.total)
    }

    /// The sum of all terms except the canary.
    fn spent(&self) -> Bytes {
        self.granted.saturating_add(self.overhead).saturating_add(self.foreign)
    }
}
