//! The device that a plan is made for: a device in this machine, or a GPU
//! described by its properties.

use bursar::{Bytes, CudaDevice, Device, DeviceChoice, DeviceError};
use bursar_actors::{profile::MemoryState, profile::OVERHEAD_AT_READY, runtime::gpus, runtime::most_free_first};
use bursar_kernels::{CudaTarget, Target};

use super::gpu::Gpu;
use crate::{device::RANKS_MAX, failure::Failure};

/// Page size of both GPUs and host devices.
const PAGE: Bytes = Bytes::mib(2);

const TOTAL: &str = "--total";

pub struct Planned {
    /// The device's name, and why it was chosen if the user did not name it.
    pub name: String,
    /// Whether the device is in this machine.
    pub is_here: bool,
    pub target: Target,
    /// The memory state of each device, sorted by available memory, largest first. If all devices
    /// have the same memory state, there is a single entry.
    pub places: Vec<MemoryState>,
    /// Number of devices of this kind that can share the model.
    pub found: usize,
    /// The flag that sets the device's memory.
    pub total_flag: &'static str,
}

pub struct DeviceSpec<'w> {
    pub choice: DeviceChoice,
    pub gpu: Option<&'w Gpu>,
    pub total: Option<Bytes>,
    pub canary: Option<Bytes>,
    /// CPU threads of a host device.
    pub threads: usize,
    /// Whether a host device is a sensible default for this model if there is no GPU.
    pub is_small: bool,
    /// Whether the model may be shared by as many devices as it needs.
    pub is_any_number: bool,
}

/// Returns the memory state of a GPU that is not in this machine. Assumes that no other process
/// uses the GPU.
pub fn absent_place(total: Bytes, canary: Option<Bytes>) -> MemoryState {
    MemoryState { total, overhead: OVERHEAD_AT_READY, foreign: Bytes::ZERO, canary, page: PAGE, is_host: false }
}

impl Planned {
    /// Finds the requested device. Opening a GPU in this machine takes about 300 ms and allocates
    /// only a CUDA context.
    pub fn of(spec: &DeviceSpec<'_>) -> Result<Self, Failure> {
        if let Some(gpu) = spec.gpu {
            return Planned::absent(gpu, &format!("{} by its specifications", gpu.name), spec);
        }
        match spec.choice {
            DeviceChoice::Host(capacity) => Ok(Planned::host(capacity, 1, spec)),
            DeviceChoice::HostRanks(ranks, capacity) => Ok(Planned::host(capacity, ranks, spec)),
            DeviceChoice::Cuda(ordinal) => Ok(Planned::present(&[ordinal], spec)?),
            DeviceChoice::CudaRanks(ref ordinals) => Ok(Planned::present(ordinals, spec)?),
            DeviceChoice::Auto(capacity) | DeviceChoice::AutoRanks(_, capacity) => {
                let count = match spec.choice {
                    DeviceChoice::AutoRanks(ranks, _) => ranks,
                    _ if spec.is_any_number => gpus().max(1),
                    _ => 1,
                };
                match Planned::present(&(0..count).collect::<Vec<_>>(), spec) {
                    // There are GPUs, but fewer than requested. Report how many there are, instead
                    // of planning for a machine without a GPU.
                    Err(why @ DeviceError::NoDevice { .. }) if gpus() > 0 => Err(why.into()),
                    Err(DeviceError::NoDevice { .. }) if spec.is_small => Ok(Planned::host(capacity, 1, spec)),
                    Err(DeviceError::NoDevice { .. }) => Planned::expected("this machine has no GPU", spec),
                    Err(DeviceError::Unusable { reason, .. }) => Planned::expected(&reason, spec),
                    planned => Ok(planned?),
                }
            }
            ref custom => unreachable!("the command line never makes {custom:?}"),
        }
    }

    fn host(capacity: Bytes, found: usize, spec: &DeviceSpec<'_>) -> Self {
        let total = spec.total.unwrap_or(capacity);
        let (overhead, foreign) = (Bytes::ZERO, Bytes::ZERO);
        let place = MemoryState { total, overhead, foreign, canary: spec.canary, page: PAGE, is_host: true };
        let name = "the host, in place of a GPU".to_owned();
        // Suggestions name --capacity, the only flag for the memory size that a start accepts,
        // unless the user typed --total, which overrides --capacity here.
        let total_flag = if spec.total.is_some() { TOTAL } else { "--capacity" };
        let target = Target::Cpu { threads: spec.threads };
        Planned { name, is_here: true, target, places: vec![place], found, total_flag }
    }

    fn expected(why: &str, spec: &DeviceSpec<'_>) -> Result<Self, Failure> {
        let gpu = Gpu::expected();
        Planned::absent(&gpu, &format!("{} by its specifications, because {why}", gpu.name), spec)
    }

    fn absent(gpu: &Gpu, name: &str, spec: &DeviceSpec<'_>) -> Result<Self, Failure> {
        let total = spec.total.or(gpu.total).ok_or_else(|| Failure {
            error: format!("the memory size of {} is not known", gpu.name),
            hint: "set --total, such as --total 80GiB, or name a product, such as --gpu h200".to_owned(),
        })?;
        let place = absent_place(total, spec.canary);
        Ok(Planned {
            name: name.to_owned(),
            is_here: false,
            target: Target::Cuda(gpu.target()),
            places: vec![place],
            found: RANKS_MAX as usize,
            total_flag: TOTAL,
        })
    }

    fn present(ordinals: &[usize], spec: &DeviceSpec<'_>) -> Result<Self, DeviceError> {
        let devices = ordinals.iter().map(|ordinal| CudaDevice::open(*ordinal)).collect::<Result<Vec<_>, _>>()?;
        let target = Target::Cuda(CudaTarget::of(&devices[0])?);
        let place = |device: &CudaDevice| {
            let place = MemoryState::of_device(device, spec.canary)?;
            Ok(MemoryState { total: spec.total.unwrap_or(place.total), ..place })
        };
        let places = devices.iter().map(place).collect::<Result<Vec<_>, DeviceError>>()?;
        // Sort the devices in the order in which a start uses them.
        let free: Vec<Bytes> = places.iter().map(MemoryState::available).collect();
        let places: Vec<MemoryState> = most_free_first(&free).into_iter().map(|number| places[number]).collect();
        let (name, found) = (devices[0].name().to_owned(), devices.len());
        Ok(Planned { name, is_here: true, target, places, found, total_flag: TOTAL })
    }

    /// Returns the memory state of the fullest device among the `ranks` devices that a start would
    /// use. The fullest device limits all ranks.
    pub fn place_of(&self, ranks: usize) -> MemoryState {
        let first = &self.places[..ranks.min(self.places.len())];
        *first.iter().min_by_key(|place| place.available()).expect("there is a device")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_with_least_memory_limits_its_group() {
        let place = |gib| absent_place(Bytes::gib(gib), None);
        let target = Target::Cpu { threads: 1 };
        let places = [80, 80, 10].map(place).to_vec();
        let planned = Planned { name: String::new(), is_here: true, target, places, found: 3, total_flag: TOTAL };
        assert_eq!([1, 2, 3].map(|ranks| planned.place_of(ranks).total.0 >> 30), [80, 80, 10]);
        let alike = Planned { places: vec![place(80)], ..planned };
        assert_eq!(alike.place_of(8).total, Bytes::gib(80));
    }
}
