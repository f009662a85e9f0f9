//! The memory of a device as a model finds it: pure.

use bursar_budgets::{Bytes, Device, DeviceError, Snapshot};

/// A device's memory, and how much of it is already in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryState {
    /// The device's memory.
    pub total: Bytes,
    /// Bytes that our process already uses: outside leases, and in leases of others than this model.
    pub overhead: Bytes,
    /// Bytes of other processes.
    pub foreign: Bytes,
    /// Bytes kept free on purpose. None for the runtime's default.
    pub canary: Option<Bytes>,
    /// The device's page: the unit in which memory is taken.
    pub page: Bytes,
    /// Whether host memory stands in for a GPU.
    pub is_host: bool,
}

/// What our process uses of a GPU outside leases: measured on an H200 with driver 580 at READY (`benches/h200.md`).
pub const OVERHEAD_AT_READY: Bytes = Bytes::mib(548);

impl MemoryState {
    /// A device that this process has opened and uses for nothing yet. By READY more is loaded than a GPU's context.
    ///
    /// # Errors
    /// Those of the device.
    pub fn of_device(device: &dyn Device, canary: Option<Bytes>) -> Result<Self, DeviceError> {
        let (memory, ours, is_host) = (device.memory()?, device.overhead(), device.is_host_memory());
        let foreign = memory.total.saturating_sub(memory.free).saturating_sub(ours);
        let overhead = if is_host { ours } else { ours.max(OVERHEAD_AT_READY) };
        Ok(MemoryState { total: memory.total, overhead, foreign, canary, page: device.page(), is_host })
    }

    /// A device on which exactly this much is available.
    pub fn of_available(available: Bytes, page: Bytes) -> Self {
        let nothing = Bytes::ZERO;
        MemoryState {
            total: available,
            overhead: nothing,
            foreign: nothing,
            canary: Some(nothing),
            page,
            is_host: false,
        }
    }

    /// The device as a ledger sees it, for a model that already holds `leased` bytes.
    pub fn of_ledger(ledger: &Snapshot, leased: Bytes, page: Bytes, is_host: bool) -> Self {
        let overhead = (ledger.overhead + ledger.granted).saturating_sub(leased);
        let Snapshot { total, foreign, canary_wanted, .. } = *ledger;
        // A default canary stays none, because on a larger device the default differs.
        let canary = Some(canary_wanted).filter(|canary| *canary != default_canary(total));
        MemoryState { total, overhead, foreign, canary, page, is_host }
    }

    /// Bytes kept free on purpose.
    pub fn canary(&self) -> Bytes {
        self.canary.unwrap_or_else(|| default_canary(self.total))
    }

    /// Bytes that can be leased.
    pub fn available(&self) -> Bytes {
        let taken = self.overhead.saturating_add(self.foreign).saturating_add(self.canary());
        self.total.saturating_sub(taken)
    }
}

/// The default canary of a device with `total` bytes: 256 MiB, or a sixteenth if it is smaller than 4 GiB.
pub fn default_canary(total: Bytes) -> Bytes {
    Bytes::mib(256).min(total / 16)
}
