//! Settings of a ledger, derived from a device.

use crate::{Bytes, Device};

/// The sizes and limits with which a ledger starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerConfig {
    pub total: Bytes,
    /// The part of `total` that this process holds outside leases.
    pub overhead: Bytes,
    /// The limit for the sum of all leases of host memory.
    pub host_total: Bytes,
    /// The maximum number of waiting requests for each kind of memory.
    pub waiting_max: usize,
}

impl LedgerConfig {
    /// A device of this size with no overhead, 1 GiB of host memory to lease, and
    /// queues of 256 requests.
    pub fn new(total: Bytes) -> Self {
        LedgerConfig { total, overhead: Bytes::ZERO, host_total: Bytes::gib(1), waiting_max: 256 }
    }

    /// The configuration for this device, from its total memory and overhead. The total is 0 if
    /// the device is lost.
    pub fn of(device: &dyn Device) -> Self {
        let total = device.memory().map_or(Bytes::ZERO, |memory| memory.total);
        LedgerConfig { overhead: device.overhead(), ..LedgerConfig::new(total) }
    }
}
