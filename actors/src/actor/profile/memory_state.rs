//! The memory of a device before a model is loaded.

use bursar_budgets::{Bytes, Device, DeviceError, Snapshot};

/// A device's memory, and how much of it is already in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryState {
    pub total: Bytes,
    /// Bytes that this process already uses: memory outside leases, and leases of other models.
    pub overhead: Bytes,
    /// Bytes held by other processes.
    pub foreign: Bytes,
    /// Bytes kept free on purpose. `None` for the runtime's default.
    pub canary: Option<Bytes>,
    /// The device's page size: the unit in which memory is backed.
    pub page: Bytes,
    /// Whether the device is host memory in place of a GPU.
    pub is_host: bool,
}

/// Memory that this process uses on a GPU outside leases at READY, measured on an H200 with driver
/// 580 (`benches/h200.md`).
pub const OVERHEAD_AT_READY: Bytes = Bytes::mib(548);

impl MemoryState {
    /// Returns the state of a device that this process has opened and not used yet. On a GPU the
    /// overhead is at least [`OVERHEAD_AT_READY`], because modules and library handles are loaded
    /// before READY, in addition to the context.
    ///
    /// # Errors
    /// Returns the error of the device.
    pub fn of_device(device: &dyn Device, canary: Option<Bytes>) -> Result<Self, DeviceError> {
        let (memory, ours, is_host) = (device.memory()?, device.overhead(), device.is_host_memory());
        let foreign = memory.total.saturating_sub(memory.free).saturating_sub(ours);
        let overhead = if is_host { ours } else { ours.max(OVERHEAD_AT_READY) };
        Ok(MemoryState { total: memory.total, overhead, foreign, canary, page: device.page(), is_host })
    }

    /// Returns the state of a device on which exactly `available` bytes can be leased.
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

    /// Returns the state according to a ledger. The model that is planned already holds `leased`
    /// bytes, which are not counted as in use.
    pub fn of_ledger(ledger: &Snapshot, leased: Bytes, page: Bytes, is_host: bool) -> Self {
        let overhead = (ledger.overhead + ledger.granted).saturating_sub(leased);
        let Snapshot { total, foreign, canary_wanted, .. } = *ledger;
        // A default canary is stored as `None`, because the default depends on the size of the
        // device.
        let canary = Some(canary_wanted).filter(|canary| *canary != default_canary(total));
        MemoryState { total, overhead, foreign, canary, page, is_host }
    }

    /// Bytes kept free on purpose.
    pub fn canary(&self) -> Bytes {
        self.canary.unwrap_or_else(|| default_canary(self.total))
    }

    /// Returns the bytes that can be leased.
    pub fn available(&self) -> Bytes {
        let taken = self.overhead.saturating_add(self.foreign).saturating_add(self.canary());
        self.total.saturating_sub(taken)
    }
}

/// Returns the default canary of a device with `total` bytes: 256 MiB, or a sixteenth of `total`
/// for devices below 4 GiB.
pub fn default_canary(total: Bytes) -> Bytes {
    Bytes::mib(256).min(total / 16)
}
