//! Memory totals by kind of use, for device or host memory.

use crate::Bytes;

/// The terms of rule 1: `granted + overhead + foreign + canary <= total`. All fields except
/// `canary_wanted` count bytes that exist now, in use or kept free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub total: Bytes,
    /// Bytes that this process holds outside leases.
    pub overhead: Bytes,
    /// Bytes that other processes hold.
    pub foreign: Bytes,
    pub granted: Bytes,
    /// Bytes kept free now: `canary_wanted`, or less after part of the canary was given up.
    pub canary: Bytes,
    /// The configured size of the canary.
    pub canary_wanted: Bytes,
}

impl Account {
    /// Bytes that are neither granted, overhead, foreign nor part of the canary.
    pub fn free(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary))
    }

    /// The largest number of bytes that can be granted now. A canary that was given up is restored
    /// before anything is granted.
    pub fn available(&self) -> Bytes {
        self.total.saturating_sub(self.spent().saturating_add(self.canary_wanted))
    }

    /// The largest number of bytes that one lease could get if all other leases and other processes
    /// were gone.
    pub fn attainable(&self) -> Bytes {
        self.total.saturating_sub(self.overhead.saturating_add(self.canary_wanted))
    }

    /// The bytes by which rule 1 is broken; 0 while it holds. Only growth of foreign or overhead
    /// memory can break the rule.
    pub fn deficit(&self) -> Bytes {
        self.spent().saturating_add(self.canary).saturating_sub(self.total)
    }

    /// The bytes that must become free before rule 1 holds with the whole canary. This number is at
    /// least the deficit. Another process can only take memory that is free on the device. While
    /// all leases are fully backed, another process can therefore shrink the canary, but cannot
    /// cause a deficit.
    pub fn owed(&self) -> Bytes {
        self.spent().saturating_add(self.canary_wanted).saturating_sub(self.total)
    }

    /// The sum of all terms except the canary.
    fn spent(&self) -> Bytes {
        self.granted.saturating_add(self.overhead).saturating_add(self.foreign)
    }
}
