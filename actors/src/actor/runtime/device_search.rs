//! Search for the fewest devices on which the models of a runtime fit. The number is known only
//! after the models are planned.

use std::{num::NonZeroUsize, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, HostConfig, HostDevice};
use bursar_kernels::Target;
use bursar_model::{
    checkpoint::{Checkpoint, CheckpointOrigin, CheckpointSource, TensorIndex},
    error::CheckpointError,
    registry,
};

use super::{
    DeviceChoice, MinDevicesFor, ModelSource,
    device::{each_once, group},
};
use crate::{
    compute::Executor,
    engine::{LoadOptions, MinRanks, PlacementQuery, StartError},
    profile::MemoryState,
};

/// The candidate devices. `opened` contains the open devices in the order in which they will be
/// used.
pub(super) struct Candidates {
    of: DeviceChoice,
    pub(super) opened: Vec<Arc<dyn Device>>,
}

/// The settings of a model, and the target on which it would run.
pub(super) struct Planned {
    pub(super) checkpoint: Checkpoint,
    pub(super) target: Target,
}

/// The most GPUs that a search opens.
const GPUS_MAX: usize = 8;

impl DeviceChoice {
    /// Resolves [`MinDevices`](DeviceChoice::MinDevices) to a number of devices, and returns the
    /// reason for each model. Other choices are returned unchanged. Reads the models' settings,
    /// and may open devices.
    ///
    /// # Errors
    /// The models do not fit on any number of devices, a model cannot be planned, or a device
    /// cannot be opened.
    pub(super) fn chosen(self, canary: Option<Bytes>) -> Result<(DeviceChoice, Vec<MinRanks>), StartError> {
        match self {
            DeviceChoice::MinDevices(min_devices) => min_devices.choose(canary),
            choice => Ok((choice, Vec::new())),
        }
    }
}

impl MinDevicesFor {
    /// Returns the device to take, and the minimum number of ranks of each model with its reason.
    /// Reads the models' settings and opens devices.
    fn choose(self, canary: Option<Bytes>) -> Result<(DeviceChoice, Vec<MinRanks>), StartError> {
        let (of, _) = self.of.chosen(canary)?;
        let (found, free) = Candidates::most_free_of(of)?;
        let chosen: Vec<_> = self
            .models
            .iter()
            .map(|(source, options)| found.min_ranks(source, options, canary))
            .collect::<Result<_, _>>()?;
        let asked = self.models.iter().filter_map(|(_, options)| options.ranks.map(NonZeroUsize::get));
        let ranks =
            chosen.iter().map(|model| model.ranks).chain(asked).max().unwrap_or(1).min(found.opened.len().max(1));
        Ok((found.first(&free, ranks), chosen))
    }
}

/// Returns the number of GPUs that can be opened, up to eight.
pub fn gpus() -> usize {
    (0..GPUS_MAX).take_while(|ordinal| CudaDevice::open(*ordinal).is_ok()).count()
}

/// Returns the checkpoint at `files`, with the draft model of `options`. If weights of the model are
/// missing, returns a checkpoint with only the settings, and the name of the model. If only weights of
/// the draft model are missing, returns only its settings, and its name.
///
/// # Errors
/// A file other than the weights is missing, or a file cannot be read.
pub fn open_settings(
    files: CheckpointSource,
    options: &LoadOptions,
) -> Result<(Checkpoint, Option<String>), CheckpointError> {
    let draft_files = options.draft_model().map(CheckpointOrigin::fetch_settings).transpose()?;
    let is_missing = |error: &CheckpointError| {
        matches!(error, CheckpointError::MissingFile { .. } | CheckpointError::MissingShard { .. })
    };
    let (checkpoint, missing) = match Checkpoint::open(files.clone()) {
        Err(error) if is_missing(&error) => {
            let planned = registry::without_weights(files)?;
            let name = planned.name().to_owned();
            (Checkpoint::open(CheckpointSource::Random(Arc::new(planned)))?, Some(name))
        }
        opened => (opened?, None),
    };
    let Some(draft_files) = draft_files else { return Ok((checkpoint, missing)) };
    match TensorIndex::open(&draft_files) {
        Err(error) if is_missing(&error) => {
            let checkpoint = checkpoint.with_random_draft_model(&draft_files)?;
            Ok((checkpoint, missing.or_else(|| Some(draft_files.place()))))
        }
        _ => Ok((checkpoint.with_draft_model(&draft_files)?, missing)),
    }
}

impl Candidates {
    /// Returns the candidates without opening any device.
    fn of(of: DeviceChoice) -> Self {
        Candidates { of, opened: Vec::new() }
    }

    /// Opens all candidates and sorts them by free memory, largest first. Returns them with the
    /// free bytes of each device, indexed by device number. With [`DeviceChoice::Auto`], the list
    /// ends before the first GPU that cannot be used. If GPU 0 exists but cannot be used, its error
    /// is returned.
    ///
    /// # Errors
    /// A named device does not exist, or a device returns an error.
    pub(super) fn most_free_of(of: DeviceChoice) -> Result<(Self, Vec<Bytes>), DeviceError> {
        if let DeviceChoice::CudaRanks(ordinals) = &of {
            each_once(ordinals)?;
        }
        let mut found = Candidates::of(of);
        loop {
            match found.open_one() {
                Ok(true) => {}
                Err(_) if matches!(found.of, DeviceChoice::Auto(_)) && !found.opened.is_empty() => break,
                Ok(false) => break,
                Err(error) => return Err(error),
            }
        }
        if let Some(missing) = found.missing() {
            // Opening the missing device returns the error that explains the problem.
            missing.open()?;
        }
        let free = found.arrange()?;
        Ok((found, free))
    }

    /// Opens the next device. Returns `false` if there are no more devices.
    fn open_one(&mut self) -> Result<bool, DeviceError> {
        let number = self.opened.len();
        let host = |capacity| Ok(Some(Arc::new(HostDevice::new(HostConfig::new(capacity))?) as Arc<dyn Device>));
        let gpu = |ordinal| match CudaDevice::open(ordinal) {
            Err(DeviceError::NoDevice { .. }) => Ok(None),
            opened => Ok(Some(Arc::new(opened?) as Arc<dyn Device>)),
        };
        let next = match &self.of {
            DeviceChoice::Host(capacity) if number == 0 => host(*capacity)?,
            DeviceChoice::HostRanks(ranks, capacity) if number < *ranks => host(*capacity)?,
            DeviceChoice::Cuda(ordinal) if number == 0 => gpu(*ordinal)?,
            DeviceChoice::CudaRanks(ordinals) => ordinals.get(number).map_or(Ok(None), |ordinal| gpu(*ordinal))?,
            DeviceChoice::Auto(capacity) if number < GPUS_MAX => match (gpu(number)?, number) {
                (None, 0) => host(*capacity)?,
                (next, _) => next,
            },
            _ => None,
        };
        let is_there = next.is_some();
        self.opened.extend(next);
        Ok(is_there)
    }

    /// Returns the first named device that does not exist.
    fn missing(&self) -> Option<DeviceChoice> {
        let named = match &self.of {
            DeviceChoice::CudaRanks(ordinals) => ordinals.len(),
            DeviceChoice::Cuda(_) => 1,
            _ => 0,
        };
        let next = self.opened.len();
        (next < named).then(|| self.these(&[next]))
    }

    /// Sorts the opened devices by free memory, largest first, and returns the free bytes of
    /// each by its number.
    fn arrange(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        let free =
            self.opened.iter().map(|device| Ok(device.memory()?.free)).collect::<Result<Vec<_>, DeviceError>>()?;
        self.opened = most_free_first(&free).into_iter().map(|number| self.opened[number].clone()).collect();
        Ok(free)
    }

    /// Returns the settings of a model and the target on which the first candidate would run the
    /// model. Returns `None` if no candidate is open: either the caller provides the device, or the
    /// GPU does not exist. A missing GPU is reported when it is opened later.
    pub(super) fn planned(&self, source: &ModelSource, options: &LoadOptions) -> Result<Option<Planned>, StartError> {
        let files = source.origin().clone().fetch_settings()?;
        let stored = files.stored_type()?;
        let checkpoint = open_settings(files, options)?.0.with_quantization(options.quantization);
        let Some(first) = self.opened.first() else { return Ok(None) };
        let best = Executor::best_target(first, options.threads)?;
        let target = options.dtype.on(best, stored)?;
        let checkpoint = options.apply_on(&target, checkpoint)?;
        Ok(Some(Planned { checkpoint, target }))
    }

    /// Returns the minimum number of candidates on which a model fits. Returns 1 if no candidate is
    /// open.
    fn min_ranks(
        &self,
        source: &ModelSource,
        options: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<MinRanks, StartError> {
        match self.planned(source, options)? {
            Some(planned) => self.min_ranks_of(&planned, source, options, canary),
            None => Ok(MinRanks { model: source.name(), ranks: 1, too_few: Vec::new() }),
        }
    }

    /// Returns the minimum number of candidates on which a planned model fits.
    pub(super) fn min_ranks_of(
        &self,
        planned: &Planned,
        source: &ModelSource,
        options: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<MinRanks, StartError> {
        let Planned { checkpoint, target } = planned;
        let name = options.name.clone().unwrap_or_else(|| source.name());
        PlacementQuery { name: &name, checkpoint, options }.min_ranks(|ranks| {
            let Some(first) = self.opened.get(..ranks) else { return Ok(None) };
            let places = first.iter().map(|device| MemoryState::of_device(&**device, canary));
            let places = places.collect::<Result<Vec<_>, _>>()?;
            let fullest = *places.iter().min_by_key(|place| place.available()).expect("there is at least one rank");
            Ok(Some((target.of_ranks(ranks), fullest)))
        })
    }

    /// Returns the first `ranks` candidates. `free` has the free bytes of each device by its
    /// number.
    fn first(self, free: &[Bytes], ranks: usize) -> DeviceChoice {
        match (self.of, ranks) {
            // Host devices are interchangeable.
            (DeviceChoice::HostRanks(_, capacity), 1) => DeviceChoice::Host(capacity),
            (DeviceChoice::HostRanks(_, capacity), ranks) => DeviceChoice::HostRanks(ranks, capacity),
            (of, ranks) => {
                let mut first: Vec<usize> = most_free_first(free).into_iter().take(ranks).collect();
                first.sort_unstable();
                Candidates { of, opened: self.opened }.these(&first)
            }
        }
    }

    /// Returns the devices with these numbers. `numbers` must not be empty. Host devices get a name
    /// that contains the numbers.
    pub(super) fn these(&self, numbers: &[usize]) -> DeviceChoice {
        match &self.of {
            DeviceChoice::HostRanks(_, capacity) => {
                let (capacity, ranks) = (*capacity, numbers.len());
                let label = numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                DeviceChoice::Made(Arc::new(move || named_hosts(&format!("host#{label}"), capacity, ranks)))
            }
            DeviceChoice::CudaRanks(ordinals) => gpus_of(numbers.iter().map(|number| ordinals[*number]).collect()),
            DeviceChoice::Auto(_) if self.opened.first().is_some_and(|device| !device.is_host_memory()) => {
                gpus_of(numbers.to_vec())
            }
            one => one.clone(),
        }
    }
}

/// Unit in which free memory is compared. Each device is ranked by the number of whole units by
/// which its free memory is below the largest free memory. Devices with equal numbers keep their
/// order.
const ALIKE: Bytes = Bytes::gib(1);

/// Returns the numbers of devices, sorted by free memory, largest first. Devices with about the
/// same free memory keep their order.
pub fn most_free_first(free: &[Bytes]) -> Vec<usize> {
    let most = free.iter().copied().max().unwrap_or(Bytes::ZERO);
    let mut numbers: Vec<usize> = (0..free.len()).collect();
    numbers.sort_by_key(|device| ((most - free[*device]).0 / ALIKE.0, *device));
    numbers
}

fn gpus_of(ordinals: Vec<usize>) -> DeviceChoice {
    match ordinals[..] {
        [ordinal] => DeviceChoice::Cuda(ordinal),
        _ => DeviceChoice::CudaRanks(ordinals),
    }
}

/// Returns one host device or, if `ranks` is not 1, a group of host devices. The result has this
/// name.
fn named_hosts(name: &str, capacity: Bytes, ranks: usize) -> Result<Arc<dyn Device>, DeviceError> {
    let host = |config| Ok(Arc::new(HostDevice::new(config)?) as Arc<dyn Device>);
    if ranks == 1 {
        return host(HostConfig { name: name.to_owned(), ..HostConfig::new(capacity) });
    }
    group((0..ranks).map(|_| host(HostConfig::new(capacity))), name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_devices_with_most_free_memory_are_chosen() {
        let host =
            |gib| Arc::new(HostDevice::new(HostConfig::new(Bytes::gib(gib))).expect("a host")) as Arc<dyn Device>;
        let found = |of: DeviceChoice| {
            let mut found = Candidates { of, opened: [2, 12, 11, 12].map(host).to_vec() };
            let free = found.arrange().expect("the devices report their free memory");
            move |ranks| {
                format!("{:?}", Candidates { of: found.of.clone(), opened: found.opened.clone() }.first(&free, ranks))
            }
        };
        let named = found(DeviceChoice::CudaRanks(vec![4, 5, 6, 7]));
        assert_eq!([1, 2, 4].map(named), ["Cuda(5)", "CudaRanks([5, 7])", "CudaRanks([4, 5, 6, 7])"]);
        // Host devices are interchangeable.
        assert!(found(DeviceChoice::HostRanks(4, Bytes::gib(1)))(2).starts_with("HostRanks(2"));
    }

    #[test]
    fn a_named_device_that_is_missing_or_repeated_is_refused() {
        let of = DeviceChoice::CudaRanks(vec![61, 62]);
        assert!(matches!(
            Candidates::most_free_of(of),
            Err(DeviceError::NoDevice { .. } | DeviceError::Unusable { .. })
        ));
        let twice = Candidates::most_free_of(DeviceChoice::CudaRanks(vec![0, 0]))
            .map(drop)
            .expect_err("one device is named twice");
        assert!(twice.to_string().contains("names a GPU twice"), "{twice}");
    }
}
