//! Choice of the device that a runtime leases, and how the device is opened or reopened after a
//! loss.

use std::{collections::BTreeSet, fmt, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, DeviceGroup, HostConfig, HostDevice};

use super::ModelSource;
use crate::engine::LoadOptions;

/// The device that a runtime leases.
#[derive(Clone)]
pub enum DeviceChoice {
    /// The first GPU. Without a GPU, host memory of this capacity is used in its place; then
    /// [`Runtime::host_fallback_reason`](super::Runtime::host_fallback_reason) and a `tracing`
    /// event give the reason. A GPU that fails, or whose driver is too old, is an error.
    Auto(Bytes),
    /// The GPU with this index, in the numbering of `CUDA_VISIBLE_DEVICES`.
    Cuda(usize),
    /// Host memory of this capacity, in pages of 2 MiB, in place of a GPU.
    Host(Bytes),
    /// The first N GPUs as one device: each model is sharded over them. Without a GPU, N host
    /// devices of this capacity are used in their place.
    AutoRanks(usize, Bytes),
    /// Several GPUs as one device: each model is sharded over them.
    CudaRanks(Vec<usize>),
    /// Several host devices as one device, in place of GPUs: each model is sharded over them. Each
    /// host device has this capacity.
    HostRanks(usize, Bytes),
    /// The fewest devices on which the models that will be loaded fit.
    MinDevices(Box<MinDevicesFor>),
    /// A device that the caller provides, for tests with faults. The runtime ends when this device
    /// is lost.
    Custom(Arc<dyn Device>),
    /// Devices that the caller creates: the closure is called at the start and again after each
    /// loss.
    Made(MakeDevice),
}

/// Request for the fewest devices on which each of the models fits according to its plan, and over
/// which the model's attention heads can be sharded.
#[derive(Clone)]
pub struct MinDevicesFor {
    /// The devices to choose from: the named devices or, with [`DeviceChoice::Auto`], the first
    /// eight GPUs. The devices with the most free memory are taken. A device that the caller
    /// provides is used unchanged.
    pub of: DeviceChoice,
    /// The models that the runtime will load, with their options. Each model is planned as if it
    /// were the only one. The result is the largest number of devices that any model needs or asks
    /// for ([`LoadOptions::ranks`]).
    pub models: Vec<(ModelSource, LoadOptions)>,
}

impl fmt::Debug for MinDevicesFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} for {:?}", self.of, self.models.iter().map(|(source, _)| source.name()).collect::<Vec<_>>())
    }
}

/// A function that creates a device. It may block.
pub type MakeDevice = Arc<dyn Fn() -> Result<Arc<dyn Device>, DeviceError> + Send + Sync>;

impl fmt::Debug for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto(bytes) => write!(f, "Auto({bytes})"),
            DeviceChoice::Cuda(ordinal) => write!(f, "Cuda({ordinal})"),
            DeviceChoice::Host(bytes) => write!(f, "Host({bytes})"),
            DeviceChoice::AutoRanks(ranks, bytes) => write!(f, "AutoRanks({ranks}, {bytes})"),
            DeviceChoice::CudaRanks(ordinals) => write!(f, "CudaRanks({ordinals:?})"),
            DeviceChoice::HostRanks(ranks, bytes) => write!(f, "HostRanks({ranks}, {bytes})"),
            DeviceChoice::MinDevices(min_devices) => write!(f, "MinDevices({min_devices:?})"),
            DeviceChoice::Custom(device) => write!(f, "Custom({})", device.name()),
            DeviceChoice::Made(_) => write!(f, "Made"),
        }
    }
}

pub(super) struct Opened {
    pub(super) device: Arc<dyn Device>,
    /// Why host memory is used, if a GPU was wanted.
    pub(super) host_fallback_reason: Option<DeviceError>,
    /// Function that creates another device of the same kind. `None` if a lost device cannot be
    /// replaced.
    pub(super) again: Option<MakeDevice>,
}

impl DeviceChoice {
    /// Opens the device. Creating a GPU context takes about 300 ms, so call this function on a
    /// thread that may block.
    pub(super) fn open(self) -> Result<Opened, DeviceError> {
        let make: MakeDevice = match self {
            DeviceChoice::Auto(capacity) => {
                return match DeviceChoice::Cuda(0).open() {
                    Err(why @ DeviceError::NoDevice { .. }) => {
                        let opened = DeviceChoice::Host(capacity).open()?;
                        Ok(Opened { host_fallback_reason: Some(why), ..opened })
                    }
                    opened => opened,
                };
            }
            DeviceChoice::AutoRanks(ranks, capacity) => {
                return match DeviceChoice::CudaRanks((0..ranks).collect()).open() {
                    // If there is at least one GPU, host memory is not used. The error reports how
                    // many GPUs there are.
                    Err(why @ DeviceError::NoDevice { .. }) if CudaDevice::open(0).is_err() => {
                        let opened = DeviceChoice::HostRanks(ranks, capacity).open()?;
                        Ok(Opened { host_fallback_reason: Some(why), ..opened })
                    }
                    opened => opened,
                };
            }
            DeviceChoice::MinDevices(_) => unreachable!("a number of devices is chosen before they are opened"),
            DeviceChoice::Custom(device) => return Ok(Opened { device, host_fallback_reason: None, again: None }),
            DeviceChoice::Cuda(ordinal) => Arc::new(move || Ok(Arc::new(CudaDevice::open(ordinal)?))),
            DeviceChoice::Host(capacity) => Arc::new(move || Ok(Arc::new(HostDevice::new(HostConfig::new(capacity))?))),
            DeviceChoice::CudaRanks(ordinals) => Arc::new(move || {
                each_once(&ordinals)?;
                let open = |ordinal: &usize| Ok(Arc::new(CudaDevice::open(*ordinal)?) as Arc<dyn Device>);
                let label = ordinals.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                group(ordinals.iter().map(open), format!("cuda:{label}"))
            }),
            DeviceChoice::HostRanks(ranks, capacity) => Arc::new(move || {
                let open = |_| Ok(Arc::new(HostDevice::new(HostConfig::new(capacity))?) as Arc<dyn Device>);
                group((0..ranks).map(open), format!("host:{ranks}"))
            }),
            DeviceChoice::Made(make) => make,
        };
        Ok(Opened { device: make()?, host_fallback_reason: None, again: Some(make) })
    }
}

/// Checks that no GPU is named twice, because a GPU can run only one rank of a model.
pub(super) fn each_once(ordinals: &[usize]) -> Result<(), DeviceError> {
    if ordinals.iter().collect::<BTreeSet<_>>().len() == ordinals.len() {
        return Ok(());
    }
    let reason = format!("{ordinals:?} names a GPU twice, but each GPU can run only one rank of a model");
    Err(DeviceError::Unusable { reason, hint: "name each GPU once".to_owned() })
}

/// Returns the devices of all ranks as one device.
pub(super) fn group(
    ranks: impl Iterator<Item = Result<Arc<dyn Device>, DeviceError>>,
    label: String,
) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(DeviceGroup::of(ranks.collect::<Result<_, _>>()?, label)?))
}

#[cfg(test)]
mod tests {
    use bursar_budgets::Hint;

    use super::*;

    #[test]
    fn the_host_device_replaces_a_missing_gpu_with_a_reason() {
        let opened = DeviceChoice::Auto(Bytes::mib(64)).open().expect("a GPU or a host device opens");
        assert!(opened.again.is_some(), "either device can be opened again");
        match opened.host_fallback_reason {
            Some(why) => {
                assert!(matches!(why, DeviceError::NoDevice { .. }) && why.hint().is_some(), "{why}");
                assert_eq!(opened.device.memory().expect("the device reports its memory").total, Bytes::mib(64));
            }
            None => assert!(!opened.device.is_host_memory(), "the device should be a GPU"),
        }
    }

    #[test]
    fn a_missing_named_gpu_is_an_error_without_fallback() {
        let error = DeviceChoice::Cuda(4096).open().err().expect("no machine has this many GPUs");
        assert!(matches!(error, DeviceError::NoDevice { .. }), "{error:?}");
        assert!(!error.hint().expect("the error has a hint").is_empty());
    }

    #[test]
    fn an_empty_or_repeating_group_of_devices_is_refused() {
        for choice in [
            DeviceChoice::CudaRanks(vec![]),
            DeviceChoice::CudaRanks(vec![1, 0, 1]),
            DeviceChoice::HostRanks(0, Bytes::mib(1)),
        ] {
            let error = choice.open().err().expect("the choice of devices is refused");
            assert!(matches!(error, DeviceError::Unusable { .. }) && error.hint().is_some(), "{error:?}");
        }
    }

    #[test]
    fn a_custom_device_is_not_recreated() {
        let device: Arc<dyn Device> = Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(1))).expect("small pages"));
        assert!(DeviceChoice::Custom(device).open().expect("the custom device opens").again.is_none());
    }
}
