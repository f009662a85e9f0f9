//! Opening a GPU, and closing it.

use std::sync::{Mutex, OnceLock, PoisonError, atomic::AtomicU64};

use cudarc::driver::sys;

use super::{
    carve,
    context::{Context, Stream},
    driver::{self, check},
    gpu::{CudaDevice, open_devices},
    meter::Meter,
    nvml::Nvml,
};
use crate::{Address, AtomicBytes, Bytes, DeviceError, Timelines};

/// The approximate size of a context: 526 MiB on an H200 with driver 580.
const CONTEXT: Bytes = Bytes(526 << 20);

/// The smallest plausible increase of the memory that NVML reports for this process when a device
/// is opened. If the process already had a context, opening a device takes only the spare pages.
/// The threshold is half of the size of the spare pages.
const SPARE_AT_LEAST: Bytes = Bytes(carve::SPARE.0 / 2);

/// The largest part of a context that NVML's count may leave out. 6 MiB were observed.
const UNCOUNTED_MOST: Bytes = Bytes::mib(32);

impl CudaDevice {
    /// Opens the device with this ordinal, in the order of `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] if there is no driver or no such device. [`DeviceError::Unusable`]
    /// if the driver cannot be initialized or is older than CUDA 12.4, or if another process uses
    /// the device exclusively. [`DeviceError::Refused`] if too little memory is free for a context.
    /// [`DeviceError::Lost`] if this process has lost the device before, because driver 580 creates
    /// no second context after a loss.
    pub fn open(ordinal: usize) -> Result<CudaDevice, DeviceError> {
        let device = driver::load(ordinal)?;
        let name = device_name(device)?;
        let uuid = driver::value("cuDeviceGetUuid", |out| unsafe { sys::cuDeviceGetUuid_v2(out, device) })?;
        // Until this process has a context, all used memory belongs to other processes.
        let nvml = Nvml::of(&uuid.bytes);
        let before = nvml.as_ref().and_then(Nvml::free_bytes);
        let counted_before = nvml.as_ref().and_then(Nvml::process_bytes).unwrap_or_default();
        let context = Context::retain(device).map_err(|error| match error {
            DeviceError::Refused { free, .. } => {
                let hint =
                    "stop other processes on the GPU (nvidia-smi lists them); a CUDA context takes about 0.5 GiB";
                DeviceError::Refused { asked: CONTEXT, free: before.unwrap_or(free), hint: hint.to_owned() }
            }
            error => driver::gives_no_context(error),
        })?;
        let stream = Stream::new(&context)?;
        let properties = driver::properties(device);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let page = driver::value("cuMemGetAllocationGranularity", |out| unsafe {
            sys::cuMemGetAllocationGranularity(out, &properties, minimum)
        })? as u64;
        let mut opened = CudaDevice {
            kept: Mutex::default(),
            name,
            ordinal,
            device,
            stream,
            context,
            nvml,
            page: Bytes(page),
            context_bytes: Bytes::ZERO,
            uncounted: None,
            meter: Meter::default(),
            allocations: AtomicU64::default(),
            pinned: AtomicBytes::default(),
            timelines: Timelines::default(),
            state: Mutex::default(),
            spare: Mutex::default(),
            lost: OnceLock::new(),
        };
        opened.replenish();
        let after = driver::memory()?.free;
        // Without NVML, only the spare pages can be counted here, and the context counts as memory
        // of other processes.
        let fell = before.map_or(carve::SPARE, |before| before.saturating_sub(after));
        let counted = opened.nvml.as_ref().and_then(Nvml::process_bytes);
        // In a container, NVML may report another process under the id of this process. Use the
        // count only if it has just increased by a plausible amount.
        let counted =
            counted.filter(|counted| (SPARE_AT_LEAST..=fell).contains(&counted.saturating_sub(counted_before)));
        // Exclude memory that other processes took while the device was opened.
        let most = counted.map_or(fell, |counted| counted - counted_before + UNCOUNTED_MOST);
        opened.context_bytes = fell.min(most);
        opened.uncounted = counted.map(|counted| opened.context_bytes.0 as i64 - counted.0 as i64);
        *open_devices().entry(ordinal).or_default() += 1;
        Ok(opened)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Some(open) = open_devices().get_mut(&self.ordinal) {
            *open -= 1;
        }
        // Return all memory here, because the stream and the context drop after this.
        let addresses: Vec<Address> = self.lock().reservations.keys().copied().collect();
        for address in addresses {
            drop(self.release_addresses(address));
        }
        let spare = std::mem::take(self.spare.get_mut().unwrap_or_else(PoisonError::into_inner));
        spare.into_iter().for_each(|page| drop(self.release(page)));
    }
}

fn device_name(device: sys::CUdevice) -> Result<String, DeviceError> {
    let mut name = [0u8; 128];
    // SAFETY: the driver writes at most `name.len()` bytes, including a terminating zero.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) })?;
    Ok(String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned())
}
