//! A device as a model finds it. Pure.

use bursar_budgets::{Bytes, Snapshot};

/// A device's memory, and what of that is somebody's already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device's memory.
    pub total: Bytes,
    /// What our process uses already: outside leases, and in leases of others than this model.
    pub overhead: Bytes,
    /// What other processes hold.
    pub foreign: Bytes,
    /// What is kept free of use; none for what a runtime keeps by default.
    pub canary: Option<Bytes>,
    /// The page that memory is taken in.
    pub page: Bytes,
    /// Whether host memory stands in for a GPU.
    pub is_host: bool,
}

impl Place {
    /// Nothing but so many bytes to be had.
    pub fn of_available(available: Bytes, page: Bytes) -> Self {
        let nothing = Bytes::ZERO;
        Place { total: available, overhead: nothing, foreign: nothing, canary: Some(nothing), page, is_host: false }
    }

    /// As a ledger has it, for a model of which so many bytes are leased already.
    pub fn of_ledger(ledger: &Snapshot, leased: Bytes, page: Bytes, is_host: bool) -> Self {
        let overhead = (ledger.overhead + ledger.granted).saturating_sub(leased);
        let Snapshot { total, foreign, canary_wanted, .. } = *ledger;
        // One that nobody has said is another on a larger device.
        let canary = Some(canary_wanted).filter(|canary| *canary != default_canary(total));
        Place { total, overhead, foreign, canary, page, is_host }
    }

    /// What is kept free of use.
    pub fn canary(&self) -> Bytes {
        self.canary.unwrap_or_else(|| default_canary(self.total))
    }

    /// What leases can be had of.
    pub fn available(&self) -> Bytes {
        let taken = self.overhead.saturating_add(self.foreign).saturating_add(self.canary());
        self.total.saturating_sub(taken)
    }
}

/// What a runtime keeps free of a device of so many bytes where nobody has said anything: 256 MiB, or a sixteenth.
pub fn default_canary(total: Bytes) -> Bytes {
    Bytes::mib(256).min(Bytes(total.0 / 16))
}
