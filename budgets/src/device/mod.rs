//! Devices, which provide the memory.

mod address;
mod concrete;
mod cuda;
mod error;
mod faulty;
mod group;
mod host;
mod host_copy;
mod host_memory;
mod interface;
mod pages;
mod system_memory;

pub use address::Address;
pub use cuda::{CudaCounts, CudaDevice, Overhead, Pinned};
pub use error::DeviceError;
pub use faulty::{FaultyDevice, NextBackRefused};
pub use group::DeviceGroup;
pub use host::{HostConfig, HostDevice, testing};
pub use host_copy::HostCopy;
pub use host_memory::HostMemory;
pub use interface::{Device, DeviceMemory};
pub use system_memory::{give_back_freed_memory, give_large_blocks_back, system_memory_left};
