//! The seam to memory: addresses are reserved, pages behind them are backed and unbacked.

mod cuda;
mod host;
mod pages;

use std::{fmt, sync::Arc};

use serde::Serialize;

pub use cuda::{CudaCounts, CudaDevice, Overhead, Pinned};
pub use host::{HostConfig, HostCounts, HostDevice, Script};

use crate::{Bytes, Fence, Hint, Timeline};

/// An address on a device. Not a pointer: only the device's own code may turn it into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The address so many bytes further.
    pub fn offset(self, bytes: Bytes) -> Address {
        Address(self.0.checked_add(bytes.0).expect("an address within u64"))
    }

    /// The first address from here on that is aligned to `bytes`.
    pub(crate) fn round_up(self, bytes: Bytes) -> Address {
        Address(self.0.next_multiple_of(bytes.0))
    }

    /// Whether this is aligned to `bytes`.
    pub fn is_multiple_of(self, bytes: Bytes) -> bool {
        self.0.is_multiple_of(bytes.0)
    }

    /// How far this is behind `start`.
    pub fn distance_from(self, start: Address) -> Bytes {
        Bytes(self.0) - Bytes(start.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// All of it.
    pub total: Bytes,
    /// What nobody uses, neither we nor another process.
    pub free: Bytes,
}

/// One GPU, or the host standing in for one.
///
/// `back`, `unback` and `release_reservation` may take a third of a second for a whole card: call them where a thread may
/// wait. A device that is lost still takes memory and addresses back (the driver of a GPU does), and gives none. The calls are those of the driver's virtual-memory interface: `reserve` is `cuMemAddressReserve`, `back` is
/// `cuMemCreate` + `cuMemMap` + `cuMemSetAccess`, `unback` is `cuMemUnmap` + `cuMemRelease`. Sizes and addresses are whole
/// pages. A call that fails leaves everything as it was.
pub trait Device: Send + Sync + 'static {
    /// What a person calls it.
    fn name(&self) -> &str;

    /// Which it is of this machine, in one word, as it is chosen by: `host`, or `cuda:0`.
    fn label(&self) -> String {
        if self.is_host_memory() { "host" } else { "device" }.to_owned()
    }

    /// What stands between it and this process, with its version: what was measured under one need not hold under another.
    /// It may take a moment. A device that knows none says nothing.
    fn driver(&self) -> String {
        String::new()
    }

    /// The smallest piece that can be backed; 2 MiB on CUDA.
    fn page(&self) -> Bytes;

    /// Whether the host can read and write at its addresses.
    fn is_host_memory(&self) -> bool;

    /// This device as a GPU, for the backend that launches on one.
    fn as_cuda(self: Arc<Self>) -> Option<Arc<CudaDevice>> {
        None
    }

    /// What the driver reports now.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;

    /// Whether it is there, as far as is known without asking the driver. What was computed on a device that is lost is
    /// worth nothing, whatever the computation itself says.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], from the first call on that was told so.
    fn check(&self) -> Result<(), DeviceError>;

    /// Bytes our process uses that no lease can hold: context, loaded modules, library handles. Asked often: it takes no
    /// time.
    fn overhead(&self) -> Bytes;

    /// What that is made of, by its source: together [`overhead`](Device::overhead). A device that does not know says
    /// nothing.
    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        vec![]
    }

    /// All that our process has taken of it since this was made, by the driver's own count, under leases or not; none where
    /// the driver does not tell processes apart. What exceeds leases and overhead is drift.
    fn process_bytes(&self) -> Option<Bytes> {
        None
    }

    /// Takes addresses, and no memory, for this many bytes.
    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError>;

    /// Gives addresses back, with whatever is still backed behind them. `address` is what `reserve` returned.
    fn release_reservation(&self, address: Address) -> Result<(), DeviceError>;

    /// Puts zeroed memory behind these addresses. None of them may be backed.
    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Takes the memory behind these addresses away; a later use of them is a fault. All of them must be backed, and the
    /// device must be past their last use.
    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Whether the next [`back`](Device::back) is refused, however much is free: for drills. It is once, and a device that
    /// knows no drills does nothing.
    fn refuse_next_back(&self, _is_refused: bool) {}

    /// A timeline for one more lane of this device.
    fn timeline(&self) -> Timeline;

    /// The end of everything issued so far on every lane.
    fn fence_here(&self) -> Fence;
}

/// What a device says no with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not enough memory: less may still succeed.
    #[error("the device refused {} ({asked}): {} ({free}) are free", asked.exact(), free.exact())]
    Refused {
        /// How much was wanted.
        asked: Bytes,
        /// How much there was.
        free: Bytes,
        /// What to change.
        hint: String,
    },
    /// The device is gone: every lane, lease and address on it is worthless, and nothing but a new context helps.
    #[error("the device is lost: {reason}")]
    Lost {
        /// What the driver said.
        reason: String,
    },
    /// The addresses are not whole pages of one reservation, or not (un)backed as the call needs them.
    #[error("{bytes} at {address} cannot be {verb}: {reason}", bytes = bytes.exact())]
    BadRange {
        /// Where.
        address: Address,
        /// How long.
        bytes: Bytes,
        /// What was tried: backed, unbacked, released.
        verb: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// The operating system refused addresses, not memory.
    #[error("no {} of addresses to reserve: {reason}", bytes.exact())]
    NoAddresses {
        /// How long.
        bytes: Bytes,
        /// What the system said.
        reason: String,
    },
    /// The host has no page-locked memory of this size to give.
    #[error("the host refused {} of page-locked memory: {said}", asked.exact())]
    HostRefused {
        /// How much was wanted.
        asked: Bytes,
        /// What was said.
        said: String,
    },
    /// There is no such device here.
    #[error("{reason}")]
    NoDevice {
        /// What is missing.
        reason: String,
        /// What to install or to choose.
        hint: String,
    },
    /// There may be such a device here, and neither it nor what it is called through can be used as it is.
    #[error("{reason}")]
    Unusable {
        /// What is wrong with it.
        reason: String,
        /// What to change.
        hint: String,
    },
    /// The driver says no, and neither for want of memory nor because the device is lost: a bug of ours.
    #[error("{call}: {said}")]
    Driver {
        /// Which of its calls.
        call: &'static str,
        /// What it said.
        said: String,
    },
    /// A host device of this capacity cannot be made.
    #[error("a host device of {capacity} cannot be: from {least} to {most} are possible here")]
    Capacity {
        /// What was asked for.
        capacity: Bytes,
        /// A page.
        least: Bytes,
        /// The memory of the machine.
        most: Bytes,
    },
    /// A device cannot be made like this.
    #[error("a page of {} cannot be: {reason}", page.exact())]
    BadPage {
        /// The page that was configured.
        page: Bytes,
        /// Why not.
        reason: String,
    },
}

impl DeviceError {
    /// Whether the same call with fewer bytes may succeed.
    pub fn is_refused(&self) -> bool {
        matches!(self, DeviceError::Refused { .. })
    }

    /// Whether everything on the device has to be failed.
    pub fn is_lost(&self) -> bool {
        matches!(self, DeviceError::Lost { .. })
    }
}

impl Hint for DeviceError {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Refused { hint, .. } => Some(hint.clone()),
            DeviceError::Lost { .. } => {
                Some("start the program again: a process that lost a GPU gets no other context".into())
            }
            DeviceError::NoDevice { hint, .. } | DeviceError::Unusable { hint, .. } => Some(hint.clone()),
            DeviceError::HostRefused { .. } => {
                Some("free memory of the host, or raise its limit on locked memory (ulimit -l)".into())
            }
            DeviceError::BadRange { .. } | DeviceError::Driver { .. } => None,
            DeviceError::NoAddresses { .. } => Some("raise the limit on address space (ulimit -v)".into()),
            DeviceError::Capacity { most, .. } => {
                Some(format!("set `capacity` to at most {most}, the memory of this machine"))
            }
            DeviceError::BadPage { .. } => Some("use a power of two that is a multiple of the system's page".into()),
        }
    }
}
