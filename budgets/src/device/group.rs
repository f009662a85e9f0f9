//! A device made of several devices, one for each rank of a model. All of them back the same amount
//! of memory.

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    address::Address,
    error::DeviceError,
    host_copy::HostCopy,
    interface::{Device, DeviceMemory},
};
use crate::{Bytes, Fence, Timeline};

/// The devices of a model's ranks, combined into one device. Memory is backed on all ranks or on no
/// rank, so a segment has the same size on each rank. The ledger counts the bytes of one rank. The
/// rank with the least free memory is the limit for all ranks.
///
/// An address of the group is an address on the first rank. [`addresses`](Device::addresses)
/// returns the addresses on all ranks.
pub struct DeviceGroup {
    ranks: Vec<Arc<dyn Device>>,
    name: String,
    label: String,
    page: Bytes,
    /// The start address of each reservation on every rank, by the start address on the first rank.
    reservations: Mutex<BTreeMap<Address, Vec<Address>>>,
}

impl DeviceGroup {
    /// Combines devices in the order of the ranks. `label` is the word that selects this group.
    ///
    /// # Errors
    /// [`DeviceError::Unusable`] if `ranks` is empty, or the devices are not of the same kind.
    pub fn of(ranks: Vec<Arc<dyn Device>>, label: impl Into<String>) -> Result<Self, DeviceError> {
        let Some(first) = ranks.first() else {
            let reason = "the group has no device".to_owned();
            return Err(DeviceError::Unusable { reason, hint: "name at least one device".to_owned() });
        };
        if let Some(other) = ranks.iter().find(|other| other.name() != first.name() || other.page() != first.page()) {
            let reason = format!("{} and {} cannot run one model together", first.name(), other.name());
            let hint = "name devices of the same kind".to_owned();
            return Err(DeviceError::Unusable { reason, hint });
        }
        let (name, page) = (format!("{} x {}", ranks.len(), first.name()), first.page());
        Ok(DeviceGroup { name, label: label.into(), page, reservations: Mutex::default(), ranks })
    }

    /// Calls `change` for each address and the device of its rank, and continues after an error.
    /// `addresses` may cover only the first ranks. Returns the first error.
    fn on_each(
        &self,
        addresses: &[Address],
        change: impl Fn(&dyn Device, Address) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let each = self.numbered().zip(addresses);
        let each = each.map(|((rank, device), address)| self.named(rank, change(&**device, *address)));
        each.fold(Ok(()), Result::and)
    }

    fn numbered(&self) -> impl Iterator<Item = (usize, &Arc<dyn Device>)> {
        self.ranks.iter().enumerate()
    }

    /// Adds the label of this rank's GPU to an error.
    fn named<T>(&self, rank: usize, outcome: Result<T, DeviceError>) -> Result<T, DeviceError> {
        outcome.map_err(|error| error.on_rank(self, rank))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Address, Vec<Address>>> {
        // Each change is a single insertion or removal, so a poisoned lock guards a valid map.
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank with the most overhead.
    fn heaviest(&self) -> &Arc<dyn Device> {
        self.ranks.iter().max_by_key(|rank| rank.overhead()).expect("a group has a device")
    }
}

impl Device for DeviceGroup {
    fn name(&self) -> &str {
        &self.name
    }

    fn label(&self) -> String {
        self.label.clone()
    }

    fn driver(&self) -> String {
        self.ranks[0].driver()
    }

    fn page(&self) -> Bytes {
        self.page
    }

    fn is_host_memory(&self) -> bool {
        self.ranks[0].is_host_memory()
    }

    /// Returns the last rank if the ranks are host devices, so that the faults of a drill affect
    /// only one rank. Otherwise returns the group.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        match self.ranks.last().and_then(|last| last.clone().as_host()) {
            Some(host) => host,
            None => self,
        }
    }

    fn ranks(&self) -> &[Arc<dyn Device>] {
        &self.ranks
    }

    fn addresses(&self, address: Address) -> Vec<Address> {
        let reservations = self.lock();
        let found = reservations.range(..=address).next_back();
        let (start, all) = found.expect("the address is reserved by this group");
        all.iter().map(|first| first.offset(address.distance_from(*start))).collect()
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        let memory = self.numbered().map(|(rank, device)| self.named(rank, device.memory()));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let least = |of: fn(&DeviceMemory) -> Bytes| memory.iter().map(of).min().unwrap_or_default();
        Ok(DeviceMemory { total: least(|memory| memory.total), free: least(|memory| memory.free) })
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.numbered().try_for_each(|(rank, device)| self.named(rank, device.check()))
    }

    fn overhead(&self) -> Bytes {
        self.heaviest().overhead()
    }

    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        self.heaviest().overhead_by_source()
    }

    fn process_bytes(&self) -> Option<Bytes> {
        // Compare only the bytes beyond each rank's overhead. Otherwise a rank with more overhead
        // could hide the drift of another rank.
        let beyond = |rank: &Arc<dyn Device>| Some(rank.process_bytes()?.saturating_sub(rank.overhead()));
        let most = self.ranks.iter().map(beyond).collect::<Option<Vec<_>>>()?.into_iter().max()?;
        Some(self.overhead() + most)
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        let mut addresses = Vec::with_capacity(self.ranks.len());
        for (rank, device) in self.numbered() {
            match self.named(rank, device.reserve(bytes)) {
                Ok(address) => addresses.push(address),
                Err(error) => {
                    drop(self.on_each(&addresses, |rank, address| rank.release_reservation(address)));
                    return Err(error);
                }
            }
        }
        let first = addresses[0];
        self.lock().insert(first, addresses);
        Ok(first)
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        let addresses = self.addresses(address);
        // Remove the entry first, because the ranks may reuse the addresses at once.
        self.lock().remove(&address);
        self.on_each(&addresses, |rank, address| rank.release_reservation(address))
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        let addresses = self.addresses(address);
        for ((rank, device), address) in self.numbered().zip(&addresses) {
            self.named(rank, device.back(*address, bytes)).inspect_err(|_| {
                // Unbacking fails only on a lost device, whose memory is lost too.
                drop(self.on_each(&addresses[..rank], |device, address| device.unback(address, bytes)));
            })?;
        }
        Ok(())
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.on_each(&self.addresses(address), |rank, address| rank.unback(address, bytes))
    }

    fn open_to_ranks(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        let gpus: Option<Vec<_>> = self.ranks.iter().map(|rank| rank.clone().as_cuda()).collect();
        for ((rank, own), address) in gpus.iter().flatten().enumerate().zip(self.addresses(address)) {
            self.named(rank, own.open_to(gpus.iter().flatten(), address, bytes))?;
        }
        Ok(())
    }

    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        let each = self.numbered().zip(self.addresses(address));
        let copies = each.map(|((rank, device), at)| self.named(rank, device.clone().copy_out(at, bytes)));
        Ok(HostCopy::new(copies.collect::<Result<Vec<HostCopy>, _>>()?))
    }

    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        let copies: &Vec<HostCopy> = copy.get(address)?;
        if copies.len() != self.ranks.len() {
            return Err(HostCopy::by_another_device(address));
        }
        let mut each = self.numbered().zip(self.addresses(address)).zip(copies);
        each.try_for_each(|(((rank, device), at), copy)| self.named(rank, device.copy_in(copy, at)))
    }

    fn timeline(&self) -> Timeline {
        self.ranks[0].timeline()
    }

    fn fence_here(&self) -> Fence {
        self.ranks.iter().fold(Fence::passed(), |all, rank| all.and(rank.fence_here()))
    }
}
