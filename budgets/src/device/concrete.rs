//! Downcasts from `dyn Device` to the concrete types of devices.

use std::sync::Arc;

use super::{CudaDevice, HostDevice, interface::Device};

impl dyn Device {
    /// This device as host memory that simulates a GPU, for fault drills. `None` if this device is
    /// a GPU. For a group of host devices, returns the device of the last rank.
    pub fn as_host(self: Arc<Self>) -> Option<Arc<HostDevice>> {
        self.as_any().downcast().ok()
    }

    /// This device as a GPU, for the backend that launches kernels. `None` if this device is host
    /// memory or a group.
    pub fn as_cuda(self: Arc<Self>) -> Option<Arc<CudaDevice>> {
        self.as_any().downcast().ok()
    }
}
