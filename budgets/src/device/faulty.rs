//! A wrapper that injects faults into a device.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::{
    address::Address,
    error::DeviceError,
    host_copy::HostCopy,
    host_memory::HostMemory,
    interface::{Device, DeviceMemory},
};
use crate::{Bytes, Fence, Timeline};

/// A device that can be made to refuse memory. Without an injected fault, it behaves
/// like the wrapped device.
pub struct FaultyDevice {
    device: Arc<dyn Device>,
    refuses_next_back: AtomicBool,
}

/// Until this guard is dropped, the device refuses the next call to [`back`](Device::back), once.
#[derive(Debug)]
#[must_use = "dropping the guard cancels the refusal"]
pub struct NextBackRefused(Arc<FaultyDevice>);

impl FaultyDevice {
    pub fn over(device: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(FaultyDevice { device, refuses_next_back: AtomicBool::new(false) })
    }

    /// Refuses the next call to [`back`](Device::back), no matter how much memory is free. Dropping
    /// the guard cancels the refusal.
    pub fn refuse_next_back(self: &Arc<Self>) -> NextBackRefused {
        self.refuses_next_back.store(true, Relaxed);
        NextBackRefused(self.clone())
    }
}

impl Drop for NextBackRefused {
    fn drop(&mut self) {
        self.0.refuses_next_back.store(false, Relaxed);
    }
}

impl std::fmt::Debug for FaultyDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "FaultyDevice({})", self.name())
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn label(&self) -> String {
        self.device.label()
    }

    fn driver(&self) -> String {
        self.device.driver()
    }

    fn page(&self) -> Bytes {
        self.device.page()
    }

    fn is_host_memory(&self) -> bool {
        self.device.is_host_memory()
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self.device.clone().as_any()
    }

    fn ranks(&self) -> &[Arc<dyn Device>] {
        self.device.ranks()
    }

    fn addresses(&self, address: Address) -> Vec<Address> {
        self.device.addresses(address)
    }

    fn open_to_ranks(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.device.open_to_ranks(address, bytes)
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.device.memory()
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.device.check()
    }

    fn overhead(&self) -> Bytes {
        self.device.overhead()
    }

    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        self.device.overhead_by_source()
    }

    fn process_bytes(&self) -> Option<Bytes> {
        self.device.process_bytes()
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.device.reserve(bytes)
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        self.device.release_reservation(address)
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        if self.refuses_next_back.swap(false, Relaxed) {
            let hint = "this error was injected by a drill; ask again".to_owned();
            return Err(DeviceError::Refused { asked: bytes, free: self.memory()?.free, hint });
        }
        self.device.back(address, bytes)
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.device.unback(address, bytes)
    }

    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        self.device.clone().copy_out(address, bytes)
    }

    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        self.device.copy_in(copy, address)
    }

    fn host_memory(self: Arc<Self>, bytes: Bytes) -> Result<HostMemory, DeviceError> {
        self.device.clone().host_memory(bytes)
    }

    fn timeline(&self) -> Timeline {
        self.device.timeline()
    }

    fn fence_here(&self) -> Fence {
        self.device.fence_here()
    }
}
