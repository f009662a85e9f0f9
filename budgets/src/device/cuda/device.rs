//! A GPU as a [`Device`].

use std::{any::Any, sync::Arc};

use super::{
    super::{
        host_copy::HostCopy,
        host_memory::HostMemory,
        interface::{Device, DeviceMemory},
    },
    carve, driver,
    gpu::{CudaDevice, open_devices},
    nvml::Nvml,
};
use crate::{Address, Bytes, DeviceError, Fence, Timeline};

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn driver(&self) -> String {
        let release = self.nvml.as_ref().and_then(Nvml::driver_release);
        release.unwrap_or_else(|| format!("CUDA {}", driver::version().unwrap_or_default()))
    }

    fn page(&self) -> Bytes {
        self.page
    }

    fn is_host_memory(&self) -> bool {
        false
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.enter()?;
        self.record_loss(driver::memory())
    }

    fn check(&self) -> Result<(), DeviceError> {
        match self.lost.get() {
            Some(reason) => Err(DeviceError::Lost { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    fn overhead(&self) -> Bytes {
        self.context_bytes + self.meter.counted()
    }

    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        let spare = carve::SPARE.min(self.context_bytes);
        let always = [("context", self.context_bytes - spare), ("spare pages", spare)];
        always.into_iter().chain(self.meter.by_source()).filter(|(_, bytes)| !bytes.is_zero()).collect()
    }

    fn process_bytes(&self) -> Option<Bytes> {
        let uncounted = self.uncounted?;
        // NVML's count cannot be split if this process has opened the same GPU twice.
        let is_alone = open_devices().get(&self.ordinal) == Some(&1);
        let counted = self.nvml.as_ref().filter(|_| is_alone)?.process_bytes()?.0 as i64;
        Some(Bytes((counted + uncounted).max(0) as u64))
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.record_loss(self.reserve_addresses(bytes))
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        self.record_loss(self.release_addresses(address))
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.record_loss(self.back_range(address, bytes))
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.record_loss(self.unback_range(address, bytes))
    }

    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        Ok(HostCopy::new(self.record_loss(self.copy_to_host(address, bytes))?))
    }

    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        self.record_loss(self.copy_from_host(copy.get(address)?, address))
    }

    fn host_memory(self: Arc<Self>, bytes: Bytes) -> Result<HostMemory, DeviceError> {
        let pinned = self.record_loss(self.pinned(bytes))?;
        Ok(HostMemory::of(pinned.address(), bytes, pinned))
    }

    fn timeline(&self) -> Timeline {
        self.timelines.open()
    }

    fn fence_here(&self) -> Fence {
        self.timelines.fence_here()
    }
}
