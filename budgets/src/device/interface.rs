//! The interface to device memory: addresses are reserved, then backed with pages, then unbacked.

use std::{any::Any, sync::Arc};

use serde::Serialize;

use super::{address::Address, error::DeviceError, host_copy::HostCopy, host_memory::HostMemory};
use crate::{Bytes, Fence, Timeline};

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
/// whole GPU, so call them on a thread that may block. Memory and addresses of a lost device can
/// still be returned, as with a GPU's driver, but a lost device provides no new memory.
///
/// The calls correspond to the driver's virtual memory interface: `reserve` is
/// `cuMemAddressReserve`, `back` is `cuMemCreate` + `cuMemMap` + `cuMemSetAccess`, and
/// `unback` is `cuMemUnmap` + `cuMemRelease`. Ranges are whole pages, and `reserve` rounds its size
/// up. A `reserve` or `back` that fails changes nothing. An `unback` or `release_reservation` that
/// fails may already have returned part of the memory.
pub trait Device: Send + Sync + 'static {
    /// The name that users see.
    fn name(&self) -> &str;

    /// The word that selects this device on this machine: `host`, or `cuda:0`.
    fn label(&self) -> String {
        if self.is_host_memory() { "host" } else { "device" }.to_owned()
    }

    /// The name and version of the device's driver; empty if unknown. Measurements taken with one
    /// driver may not be valid for another driver. The call may be slow.
    fn driver(&self) -> String {
        String::new()
    }

    /// The smallest size that can be backed; 2 MiB on CUDA.
    fn page(&self) -> Bytes;

    /// Whether the host can read and write the device's addresses.
    fn is_host_memory(&self) -> bool;

    /// This device as its concrete type, for `as_host` and `as_cuda` of `dyn Device`. A wrapper
    /// returns the device that it wraps.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;

    /// The devices of a [group](crate::DeviceGroup), by rank. Empty if this is one device.
    fn ranks(&self) -> &[Arc<dyn Device>] {
        &[]
    }

    /// A name for each GPU of this device: the device's [label](Device::label), or the labels of a
    /// [group](crate::DeviceGroup)'s ranks. If labels repeat, as they do for host devices, each
    /// name also contains the rank: `host#1`.
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

    /// The address on each rank of a [group](crate::DeviceGroup) that corresponds to
    /// `address` of this device.
    fn addresses(&self, address: Address) -> Vec<Address> {
        vec![address]
    }

    /// Lets each rank of a [group](crate::DeviceGroup) access the memory that its reachable peers
    /// have backed at these addresses. Does nothing on a single device.
    ///
    /// # Errors
    /// The driver's error, if the driver refuses.
    fn open_to_ranks(&self, _address: Address, _bytes: Bytes) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The memory that the driver reports now.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;

    /// Checks whether the device works, without a call to the driver. Results of a lost device are
    /// invalid, even if a computation reported success.
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

    /// Backs these addresses with zeroed memory. All of the addresses must be unbacked.
    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError>;

    /// Removes the memory of these addresses, so that a later access faults. All of the addresses
    /// must be backed, and the device must be past their last use.
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
    /// of the copy must be backed, and no other code may use them during the copy.
    ///
    /// # Errors
    /// Any error of the device.
    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        let _ = (copy, address);
        Err(copies_nothing(self.name()))
    }

    /// Allocates host memory for copies to and from this device. For a GPU, the memory is
    /// page-locked. For a [group](crate::DeviceGroup), call this on each of the group's devices.
    /// The call may take 70 ms per 100 MiB.
    ///
    /// # Errors
    /// [`DeviceError::HostRefused`] if the host lacks the memory, or [`DeviceError::Lost`].
    fn host_memory(self: Arc<Self>, bytes: Bytes) -> Result<HostMemory, DeviceError> {
        HostMemory::pages(bytes)
    }

    /// Adds a lane of this device and returns its timeline.
    fn timeline(&self) -> Timeline;

    /// A fence after all work issued so far on every lane.
    fn fence_here(&self) -> Fence;
}

/// The error of a device that cannot copy its memory.
fn copies_nothing(device: &str) -> DeviceError {
    DeviceError::Unusable {
        reason: format!("{device} cannot copy its memory to the host"),
        hint: "implement `copy_out` and `copy_in` of `Device`".to_owned(),
    }
}

impl DeviceError {
    /// Adds the label of this rank's GPU to the error if `device` is a [group](crate::DeviceGroup).
    /// Returns the error unchanged if `device` is a single device or the error already has a label.
    pub fn on_rank(self, device: &dyn Device, rank: usize) -> DeviceError {
        match (device.ranks(), self) {
            ([], error) | (_, error @ DeviceError::OfCard { .. }) => error,
            (_, error) => DeviceError::OfCard { card: device.card_labels().swap_remove(rank), source: Box::new(error) },
        }
    }
}
