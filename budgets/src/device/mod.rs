//! The interface to memory: addresses are reserved, then backed with pages, then unbacked.

mod cuda;
mod faulty;
mod group;
mod host;
mod host_memory;
mod pages;
mod system_memory;

use std::{fmt, sync::Arc};

use serde::Serialize;

pub use cuda::{CudaCounts, CudaDevice, Overhead, Pinned};
pub use faulty::{FaultyDevice, NextBackRefused};
pub use group::DeviceGroup;
pub use host::{HostConfig, HostDevice, testing};
pub use host_memory::HostMemory;
pub use system_memory::{give_back_freed_memory, give_large_blocks_back, system_memory_left};

use crate::{Bytes, Fence, Hint, Timeline};

/// An address on a device. Not a pointer: only the device's own code may make one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The address this many bytes further.
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

/// How much memory the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// All memory of the device.
    pub total: Bytes,
    /// Memory that no process uses.
    pub free: Bytes,
}

/// One GPU, or host memory that stands in for one.
///
/// `back`, `unback` and `release_reservation` may take a third of a second for a whole card, so call them where a
/// thread may block. A lost device still accepts memory and addresses back, as a GPU's driver does, but gives none.
///
/// The calls are those of the driver's virtual-memory interface: `reserve` is `cuMemAddressReserve`, `back` is
/// `cuMemCreate` + `cuMemMap` + `cuMemSetAccess`, `unback` is `cuMemUnmap` + `cuMemRelease`. Sizes and addresses are
/// whole pages. A call that fails changes nothing.
pub trait Device: Send + Sync + 'static {
    /// The name that users see.
    fn name(&self) -> &str;

    /// The word that selects it on this machine: `host`, or `cuda:0`.
    fn label(&self) -> String {
        if self.is_host_memory() { "host" } else { "device" }.to_owned()
    }

    /// The name and version of its driver; empty if unknown. Measurements taken with one driver may not hold with
    /// another. The call may take a moment.
    fn driver(&self) -> String {
        String::new()
    }

    /// The smallest size that can be backed; 2 MiB on CUDA.
    fn page(&self) -> Bytes;

    /// Whether the host can read and write its addresses.
    fn is_host_memory(&self) -> bool;

    /// This device as host memory that stands in for a GPU, for drills.
    fn as_host(self: Arc<Self>) -> Option<Arc<HostDevice>> {
        None
    }

    /// This device as a GPU, for the backend that launches kernels.
    fn as_cuda(self: Arc<Self>) -> Option<Arc<CudaDevice>> {
        None
    }

    /// The devices of a [group](DeviceGroup), by rank. Empty if this is one device.
    fn ranks(&self) -> &[Arc<dyn Device>] {
        &[]
    }

    /// A name for each card that it consists of: its [label](Device::label), or those of a [group](DeviceGroup)'s ranks,
    /// each with its rank where some are the same, as those of host devices are.
    fn card_labels(&self) -> Vec<String> {
        let labels: Vec<String> = match self.ranks() {
            [] => vec![self.label()],
            ranks => ranks.iter().map(|rank| rank.label()).collect(),
        };
        let is_twice = |label: &String| labels.iter().filter(|other| *other == label).count() > 1;
        if labels.iter().any(is_twice) {
            labels.iter().enumerate().map(|(rank, label)| format!("{label}#{rank}")).collect()
        } else {
            labels
        }
    }

    /// What an address of this device is on each rank of a [group](DeviceGroup).
    fn addresses(&self, address: Address) -> Vec<Address> {
        vec![address]
    }

    /// Lets each rank of a [group](DeviceGroup) use what those that it can reach have backed here. Does nothing on one
    /// device.
    ///
    /// # Errors
    /// The driver refuses.
    fn open_to_ranks(&self, _address: Address, _bytes: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }

    /// How much memory the driver reports now.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;

    /// Whether the device works, as far as is known without asking the driver. Results of a lost device are worthless,
    /// even where a computation reported success.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], once any call has reported it.
    fn check(&self) -> Result<(), DeviceError>;

    /// Bytes of our process that no lease can hold: context, loaded modules, library handles. It is read often, and
    /// must be quick.
    fn overhead(&self) -> Bytes;

    /// The parts of [`overhead`](Device::overhead) by source. Empty if unknown.
    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        vec![]
    }

    /// All that our process has taken since this was made, leased or not, by the driver's count; `None` if the driver
    /// does not tell processes apart. What exceeds leases and overhead is drift.
    fn process_bytes(&self) -> Option<Bytes> {
        None
    }

    /// Reserves addresses, without memory, for this many bytes.
    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError>;

    /// Releases a reservation, with any memory still backed. `address` is what `reserve` returned.
    fn release_reservation(&self, address: Address) -> Result<(), DeviceError>;

    /// Backs these addresses with zeroed memory. None of them may be backed.
    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Takes the memory of these addresses away; a later use of them faults. All of them must be backed, and the device
    /// must be past their last use.
    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Copies what is backed here into host memory, and waits for it. Nothing may write it meanwhile.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host lacks the memory. Others of the device.
    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        let _ = (address, bytes);
        Err(copies_nothing(self.name()))
    }

    /// Copies `copy` back to where as much is backed, and waits for it. Nothing may use that meanwhile.
    ///
    /// # Errors
    /// Any error of the device.
    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        let _ = (copy, address);
        Err(copies_nothing(self.name()))
    }

    /// Takes host memory for copies of one device, which is page-locked for a GPU. For a [group](DeviceGroup), ask each
    /// of its devices. It may take some milliseconds per 100 MiB.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host lacks the memory. [`DeviceError::Lost`].
    fn host_memory(self: Arc<Self>, bytes: Bytes) -> Result<HostMemory, DeviceError> {
        HostMemory::pages(bytes)
    }

    /// Adds a lane of this device and returns its timeline.
    fn timeline(&self) -> Timeline;

    /// A fence after everything issued so far on every lane.
    fn fence_here(&self) -> Fence;
}

/// What stood in a device's memory, in host memory.
#[derive(Debug)]
pub enum HostCopy {
    /// Of a GPU, page-locked.
    Pinned(Pinned),
    /// Of host memory that stands in for a GPU.
    Pages(Box<[u8]>),
    /// Of each rank of a [group](DeviceGroup).
    OfRanks(Vec<HostCopy>),
}

/// The error of a copy that another device made.
fn of_another_device(address: Address) -> DeviceError {
    DeviceError::BadRange { address, bytes: Bytes::ZERO, verb: "copied", reason: "the copy was made by another device" }
}

/// The error of a device that has no copies.
fn copies_nothing(device: &str) -> DeviceError {
    DeviceError::Unusable {
        reason: format!("{device} cannot copy its memory to the host"),
        hint: "implement `copy_out` and `copy_in` of `Device`".to_owned(),
    }
}

/// Why a device call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not enough memory. A smaller request may succeed.
    #[error("the device refused {} ({asked}); {} ({free}) are free", asked.exact(), free.exact())]
    Refused {
        /// How much was wanted.
        asked: Bytes,
        /// How much was free.
        free: Bytes,
        /// What to change.
        hint: String,
    },
    /// The device is gone. Every lane, lease and address on it is worthless, and only a new context can help.
    #[error("the device is lost: {reason}")]
    Lost {
        /// The driver's own words.
        reason: String,
    },
    /// The addresses are not whole pages of one reservation, or are not backed or unbacked as the call needs.
    #[error("{bytes} at {address} cannot be {verb}: {reason}", bytes = bytes.exact())]
    BadRange {
        /// The first address.
        address: Address,
        /// The length.
        bytes: Bytes,
        /// What was tried: backed, unbacked or released.
        verb: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// The operating system refused addresses, not memory.
    #[error("{} of addresses cannot be reserved: {reason}", bytes.exact())]
    NoAddresses {
        /// The length.
        bytes: Bytes,
        /// The operating system's own words.
        reason: String,
    },
    /// The host has no page-locked memory of this size.
    #[error("the host refused to page-lock {}: {said}", asked.exact())]
    HostRefused {
        /// How much was wanted.
        asked: Bytes,
        /// The driver's own words.
        said: String,
    },
    /// A call to one card of a [group](DeviceGroup) failed.
    #[error("{card}: {source}")]
    OfCard {
        /// The card's label.
        card: String,
        /// Its error.
        source: Box<DeviceError>,
    },
    /// There is no such device on this machine.
    #[error("{reason}")]
    NoDevice {
        /// What is missing.
        reason: String,
        /// What to install or choose.
        hint: String,
    },
    /// The device, or the driver or library that it needs, exists but cannot be used as it is.
    #[error("{reason}")]
    Unusable {
        /// What is wrong.
        reason: String,
        /// What to change.
        hint: String,
    },
    /// A driver call failed for another reason than memory or a lost device: our bug.
    #[error("{call}: {said}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's own words.
        said: String,
    },
    /// A host device of this capacity cannot be made.
    #[error("the capacity of the host device is {capacity}; expected {least} to {most}")]
    Capacity {
        /// The capacity that was wanted.
        capacity: Bytes,
        /// The least possible: one page.
        least: Bytes,
        /// The most possible: the machine's memory.
        most: Bytes,
    },
    /// A device cannot have this page size.
    #[error("the page size is {}: {reason}", page.exact())]
    BadPage {
        /// The page that was configured.
        page: Bytes,
        /// Why not.
        reason: String,
    },
}

impl DeviceError {
    /// Whether the same call for fewer bytes may succeed.
    pub fn is_refused(&self) -> bool {
        matches!(self.of_any_card(), DeviceError::Refused { .. })
    }

    /// Whether everything on the device has failed.
    pub fn is_lost(&self) -> bool {
        matches!(self.of_any_card(), DeviceError::Lost { .. })
    }

    /// The error without the name of the card, if it is one of a [group](DeviceGroup).
    pub fn of_any_card(&self) -> &DeviceError {
        match self {
            DeviceError::OfCard { source, .. } => source.of_any_card(),
            error => error,
        }
    }

    /// The card of a [group](DeviceGroup) whose error this is.
    pub fn card(&self) -> Option<&str> {
        match self {
            DeviceError::OfCard { card, .. } => Some(card),
            _ => None,
        }
    }

    /// This error of rank `rank` of `device`, with the card's name if the device is a [group](DeviceGroup).
    pub fn on_rank(self, device: &dyn Device, rank: usize) -> DeviceError {
        match (device.ranks(), self) {
            ([], error) | (_, error @ DeviceError::OfCard { .. }) => error,
            (_, error) => DeviceError::OfCard { card: device.card_labels().swap_remove(rank), source: Box::new(error) },
        }
    }
}

impl Hint for DeviceError {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Refused { hint, .. } => Some(hint.clone()),
            DeviceError::Lost { .. } => {
                Some("start the program again: a process that lost a GPU cannot create another context".into())
            }
            DeviceError::NoDevice { hint, .. } | DeviceError::Unusable { hint, .. } => Some(hint.clone()),
            DeviceError::HostRefused { .. } => {
                Some("free host memory, or raise the limit on locked memory (ulimit -l)".into())
            }
            DeviceError::OfCard { source, .. } => source.hint(),
            DeviceError::BadRange { .. } | DeviceError::Driver { .. } => None,
            DeviceError::NoAddresses { .. } => Some("raise the limit on address space (ulimit -v)".into()),
            DeviceError::Capacity { most, .. } => {
                Some(format!("set `capacity` to at most {most}, the memory of this machine"))
            }
            DeviceError::BadPage { .. } => {
                Some("use a power of two that is a multiple of the system's page size".into())
            }
        }
    }
}
