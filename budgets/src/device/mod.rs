//! The interface to device memory: addresses are reserved, then backed with pages, then unbacked.

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

/// An address on a device. It is not a pointer: only the device's own code may turn it into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    pub fn offset(self, bytes: Bytes) -> Address {
        Address(self.0.checked_add(bytes.0).expect("an address within u64"))
    }

    /// Rounds up to a multiple of `bytes`.
    pub(crate) fn round_up(self, bytes: Bytes) -> Address {
        Address(self.0.next_multiple_of(bytes.0))
    }

    pub fn is_multiple_of(self, bytes: Bytes) -> bool {
        self.0.is_multiple_of(bytes.0)
    }

    /// The distance from `start`, which must not be after this address.
    pub fn distance_from(self, start: Address) -> Bytes {
        Bytes(self.0) - Bytes(start.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Memory as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    pub total: Bytes,
    /// Memory that no process uses.
    pub free: Bytes,
}

/// One GPU, or host memory that simulates a GPU.
///
/// `back`, `unback` and `release_reservation` may take a third of a second for the memory of a
/// whole GPU, so call them where a thread may block. A lost device still accepts the return of
/// memory and addresses, as a GPU's driver does, but provides no new memory.
///
/// The calls correspond to the driver's virtual memory interface: `reserve` is
/// `cuMemAddressReserve`, `back` is `cuMemCreate` + `cuMemMap` + `cuMemSetAccess`, and
/// `unback` is `cuMemUnmap` + `cuMemRelease`. Sizes and addresses are whole pages. A call
/// that fails changes nothing.
pub trait Device: Send + Sync + 'static {
    /// The name that users see.
    fn name(&self) -> &str;

    /// The word that selects this device on this machine: `host`, or `cuda:0`.
    fn label(&self) -> String {
        if self.is_host_memory() { "host" } else { "device" }.to_owned()
    }

    /// The name and version of the device's driver; empty if unknown. Measurements taken with one
    /// driver may not hold with another. The call may be slow.
    fn driver(&self) -> String {
        String::new()
    }

    /// The smallest size that can be backed; 2 MiB on CUDA.
    fn page(&self) -> Bytes;

    /// Whether the host can read and write the device's addresses.
    fn is_host_memory(&self) -> bool;

    /// This device as host memory that simulates a GPU, for drills.
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

    /// A name for each GPU of this device: the device's [label](Device::label), or the labels of
    /// a [group](DeviceGroup)'s ranks. If labels repeat, as they do for host devices, the rank
    /// is added to each.
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

    /// The address on each rank of a [group](DeviceGroup) that corresponds to
    /// `address` of this device.
    fn addresses(&self, address: Address) -> Vec<Address> {
        vec![address]
    }

    /// Lets each rank of a [group](DeviceGroup) access the memory that its reachable peers have
    /// backed at these addresses. Does nothing on a single device.
    ///
    /// # Errors
    /// An error of the driver, if the driver refuses.
    fn open_to_ranks(&self, _address: Address, _bytes: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The memory that the driver reports now.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;

    /// Whether the device works, as far as is known without a call to the driver. Results of a lost
    /// device are worthless, even if a computation reported success.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] if any earlier call has reported a loss.
    fn check(&self) -> Result<(), DeviceError>;

    /// Bytes of this process that no lease can cover: context, loaded modules, library handles.
    /// This is read often, so it must be fast.
    fn overhead(&self) -> Bytes;

    /// [`overhead`](Device::overhead) by source. Empty if unknown.
    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        vec![]
    }

    /// All bytes that this process has taken since the device was opened, leased or not, according
    /// to the driver; `None` if the driver does not distinguish processes. The bytes beyond leases
    /// and overhead are drift.
    fn process_bytes(&self) -> Option<Bytes> {
        None
    }

    /// Reserves addresses for this many bytes, without memory.
    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError>;

    /// Releases a reservation, including any memory that is still backed. `address` is the
    /// return value of `reserve`.
    fn release_reservation(&self, address: Address) -> Result<(), DeviceError>;

    /// Backs these addresses with zeroed memory. All of them must be unbacked.
    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Removes the memory of these addresses, so that a later access faults. All of them must be
    /// backed, and the device must be past their last use.
    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Copies the backed memory at these addresses into host memory, and waits for the copy.
    /// Nothing may write to the memory during the copy.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host lacks the memory, or any other error of the device.
    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        let _ = (address, bytes);
        Err(copies_nothing(self.name()))
    }

    /// Copies `copy` back to `address`, and waits for the copy. All bytes from `address` to the end
    /// of the copy must be backed. Nothing may use them during the copy.
    ///
    /// # Errors
    /// Any error of the device.
    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        let _ = (copy, address);
        Err(copies_nothing(self.name()))
    }

    /// Allocates host memory for copies to and from this device. For a GPU, the memory is
    /// page-locked. For a [group](DeviceGroup), call this on each of its devices. The call may take
    /// a few milliseconds per 100 MiB.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host lacks the memory, or [`DeviceError::Lost`].
    fn host_memory(self: Arc<Self>, bytes: Bytes) -> Result<HostMemory, DeviceError> {
        HostMemory::pages(bytes)
    }

    /// Adds a lane of this device and returns its timeline.
    fn timeline(&self) -> Timeline;

    /// A fence after everything issued so far on every lane.
    fn fence_here(&self) -> Fence;
}

/// A copy of a device's memory in host memory.
#[derive(Debug)]
pub enum HostCopy {
    /// A copy of a GPU's memory, in page-locked memory.
    Pinned(Pinned),
    /// A copy of a host device's memory.
    Pages(Box<[u8]>),
    /// One copy for each rank of a [group](DeviceGroup).
    OfRanks(Vec<HostCopy>),
}

/// The error for a copy that was made by another device.
fn of_another_device(address: Address) -> DeviceError {
    DeviceError::BadRange { address, bytes: Bytes::ZERO, verb: "copied", reason: "the copy was made by another device" }
}

/// The error of a device that cannot copy its memory.
fn copies_nothing(device: &str) -> DeviceError {
    DeviceError::Unusable {
        reason: format!("{device} cannot copy its memory to the host"),
        hint: "implement `copy_out` and `copy_in` of `Device`".to_owned(),
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is not enough memory. A smaller request may succeed.
    #[error("the device refused {} ({asked}); {} ({free}) are free", asked.exact(), free.exact())]
    Refused { asked: Bytes, free: Bytes, hint: String },
    /// The device is lost. All lanes, leases and addresses on it are worthless, and only a
    /// new context can help.
    #[error("the device is lost: {reason}")]
    Lost { reason: String },
    /// The range is not made of whole pages of one reservation, or its pages are not in the state
    /// (backed or unbacked) that the call requires.
    #[error("{bytes} at {address} cannot be {verb}: {reason}", bytes = bytes.exact())]
    BadRange {
        address: Address,
        bytes: Bytes,
        /// The attempted operation: backed, unbacked, copied or released.
        verb: &'static str,
        reason: &'static str,
    },
    /// The operating system or the driver refused to reserve addresses. Such a
    /// call requests no memory.
    #[error("{} of addresses cannot be reserved: {reason}", bytes.exact())]
    NoAddresses {
        bytes: Bytes,
        /// The message of the operating system or the driver.
        reason: String,
    },
    /// The host cannot provide page-locked memory of this size.
    #[error("the host refused to page-lock {}: {said}", asked.exact())]
    HostRefused { asked: Bytes, said: String },
    /// A call to one GPU of a [group](DeviceGroup) failed.
    #[error("{card}: {source}")]
    OfCard { card: String, source: Box<DeviceError> },
    #[error("{reason}")]
    NoDevice { reason: String, hint: String },
    /// The device exists, but it, its driver or a required library cannot be used
    /// in its current state.
    #[error("{reason}")]
    Unusable { reason: String, hint: String },
    /// A driver call failed for a reason other than memory or a lost device. This is
    /// a bug in Bursar.
    #[error("{call}: {said}")]
    Driver {
        /// The name of the driver's function.
        call: &'static str,
        said: String,
    },
    /// A host device cannot have this capacity.
    #[error("the capacity of the host device is {capacity}; expected {least} to {most}")]
    Capacity {
        capacity: Bytes,
        /// The minimum: one page.
        least: Bytes,
        /// The maximum: the memory of the machine.
        most: Bytes,
    },
    #[error("the page size is {}: {reason}", page.exact())]
    BadPage { page: Bytes, reason: String },
}

impl DeviceError {
    /// Whether the same call with fewer bytes may succeed.
    pub fn is_refused(&self) -> bool {
        matches!(self.of_any_card(), DeviceError::Refused { .. })
    }

    /// Whether the device is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self.of_any_card(), DeviceError::Lost { .. })
    }

    /// The error without the GPU's label, if the error comes from a GPU of a [group](DeviceGroup).
    pub fn of_any_card(&self) -> &DeviceError {
        match self {
            DeviceError::OfCard { source, .. } => source.of_any_card(),
            error => error,
        }
    }

    /// The label of the GPU of a [group](DeviceGroup) that caused this error.
    pub fn card(&self) -> Option<&str> {
        match self {
            DeviceError::OfCard { card, .. } => Some(card),
            _ => None,
        }
    }

    /// Converts to an error of this rank of `device`. If the device is a [group](DeviceGroup), the
    /// error names the GPU.
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
