//! A runtime on as few devices as its models fit on, which is known only after they are planned.

use std::{fmt, num::NonZeroUsize, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, HostConfig, HostDevice};
use bursar_kernels::Target;
use bursar_model::{
    checkpoint::{Checkpoint, CheckpointSource},
    error::CheckpointError,
    registry,
};

use super::{
    DeviceChoice, ModelSource,
    device::{each_once, group},
};
use crate::{
    compute::Executor,
    engine::{FewestRanks, LoadOptions, PlacementQuery, StartError},
    profile::MemoryState,
};

/// As few of some devices as each of these models fits on, by plan, and as its heads allow.
#[derive(Clone)]
pub struct MinDevicesFor {
    /// The devices to choose from, of which the roomiest are taken: those that are named, or with [`DeviceChoice::Auto`]
    /// every GPU. One that its caller makes is taken as it is.
    pub of: DeviceChoice,
    /// The models that the runtime will load, with their options, each planned as if alone. The one that needs the most
    /// devices, or asks for the most ([`LoadOptions::ranks`]), decides.
    pub models: Vec<(ModelSource, LoadOptions)>,
}

impl fmt::Debug for MinDevicesFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} for {:?}", self.of, self.models.iter().map(|(source, _)| source.name()).collect::<Vec<_>>())
    }
}

/// The devices that may be taken, and of them those that are open, in the order in which numbers of them are tried.
pub(super) struct Candidates {
    of: DeviceChoice,
    pub(super) opened: Vec<Arc<dyn Device>>,
}

/// A model's settings, and what it would compute on.
pub(super) struct Planned {
    pub(super) checkpoint: Checkpoint,
    pub(super) target: Target,
}

/// The most GPUs that are looked for.
const GPUS_MAX: usize = 8;

impl MinDevicesFor {
    /// The device to take, and what each model says of it. It reads the models' settings, and opens devices.
    pub(super) fn choose(self, canary: Option<Bytes>) -> Result<(DeviceChoice, Vec<FewestRanks>), StartError> {
        let (of, _) = self.of.chosen(canary)?;
        let (found, free) = Candidates::roomiest_of(of)?;
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

/// How many GPUs there are, up to eight.
pub fn gpus() -> usize {
    (0..GPUS_MAX).take_while(|ordinal| CudaDevice::open(*ordinal).is_ok()).count()
}

/// The checkpoint at `files`, or its settings alone if its weights are not all there; then the name of where they should
/// be.
///
/// # Errors
/// Files are missing or cannot be read.
pub fn open_settings(files: CheckpointSource) -> Result<(Checkpoint, Option<String>), CheckpointError> {
    match Checkpoint::open(files.clone()) {
        Err(CheckpointError::MissingFile { .. } | CheckpointError::MissingShard { .. }) => {
            let planned = registry::without_weights(files)?;
            let name = planned.name().to_owned();
            Ok((Checkpoint::open(CheckpointSource::Random(Arc::new(planned)))?, Some(name)))
        }
        opened => Ok((opened?, None)),
    }
}

impl Candidates {
    /// None is open yet.
    fn of(of: DeviceChoice) -> Self {
        Candidates { of, opened: Vec::new() }
    }

    /// All of them, the roomiest first, and what is free on each by its number. Of all GPUs, those before the first that cannot
    /// be used.
    ///
    /// # Errors
    /// One that is named is not there; those of a device.
    pub(super) fn roomiest_of(of: DeviceChoice) -> Result<(Self, Vec<Bytes>), DeviceError> {
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
            // Opening it says what is wrong.
            missing.open()?;
        }
        let free = found.arrange()?;
        Ok((found, free))
    }

    /// Opens one more device. False if there is no other.
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

    /// The first that was named and is not there.
    fn missing(&self) -> Option<DeviceChoice> {
        let named = match &self.of {
            DeviceChoice::CudaRanks(ordinals) => ordinals.len(),
            DeviceChoice::Cuda(_) => 1,
            _ => 0,
        };
        let next = self.opened.len();
        (next < named).then(|| self.these(&[next]))
    }

    /// Puts the opened devices in order, the roomiest first, and returns what is free on each by its number.
    fn arrange(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        let free =
            self.opened.iter().map(|device| Ok(device.memory()?.free)).collect::<Result<Vec<_>, DeviceError>>()?;
        self.opened = roomiest_first(&free).into_iter().map(|number| self.opened[number].clone()).collect();
        Ok(free)
    }

    /// A model as the first of them would compute it. None if there is none: a device that the caller has made, or no such
    /// GPU, which opening it will say.
    pub(super) fn planned(&self, source: &ModelSource, options: &LoadOptions) -> Result<Option<Planned>, StartError> {
        let files = source.origin().clone().bring_settings()?;
        let stored = files.stored_type()?;
        let checkpoint = open_settings(files)?.0.with_quantization(options.quantization);
        let Some(first) = self.opened.first() else { return Ok(None) };
        let best = Executor::best_target(first, options.threads)?;
        let target = options.dtype.on(best, stored)?;
        let checkpoint = checkpoint.with_cache(options.kv_cache_dtype.on(&target)?);
        Ok(Some(Planned { checkpoint, target }))
    }

    /// The fewest of them that a model fits on, which is one where none can be looked at.
    fn min_ranks(
        &self,
        source: &ModelSource,
        options: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<FewestRanks, StartError> {
        match self.planned(source, options)? {
            Some(planned) => self.min_ranks_of(&planned, source, options, canary),
            None => Ok(FewestRanks { model: source.name(), ranks: 1, too_few: Vec::new() }),
        }
    }

    /// The fewest of them that a planned model fits on.
    pub(super) fn min_ranks_of(
        &self,
        planned: &Planned,
        source: &ModelSource,
        options: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<FewestRanks, StartError> {
        let Planned { checkpoint, target } = planned;
        let name = options.name.clone().unwrap_or_else(|| source.name());
        PlacementQuery { name: &name, checkpoint, options }.min_ranks(|ranks| {
            let Some(first) = self.opened.get(..ranks) else { return Ok(None) };
            let places = first.iter().map(|device| MemoryState::of_device(&**device, canary));
            let places = places.collect::<Result<Vec<_>, _>>()?;
            let fullest = *places.iter().min_by_key(|place| place.available()).expect("there is one");
            Ok(Some((target.of_ranks(ranks), fullest)))
        })
    }

    /// The first `ranks` of them, by what is `free` on each number.
    fn first(self, free: &[Bytes], ranks: usize) -> DeviceChoice {
        match (self.of, ranks) {
            // They are alike.
            (DeviceChoice::HostRanks(_, capacity), 1) => DeviceChoice::Host(capacity),
            (DeviceChoice::HostRanks(_, capacity), ranks) => DeviceChoice::HostRanks(ranks, capacity),
            (of, ranks) => {
                let mut first: Vec<usize> = roomiest_first(free).into_iter().take(ranks).collect();
                first.sort_unstable();
                Candidates { of, opened: self.opened }.these(&first)
            }
        }
    }

    /// Those with these numbers, of which there is at least one. Host devices have a name of their own.
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

/// What devices may differ by and count as equally free.
const ALIKE: Bytes = Bytes::gib(1);

/// Numbers of devices, those with the most free bytes first, equal ones in their order.
pub fn roomiest_first(free: &[Bytes]) -> Vec<usize> {
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

/// A host device of this name, or a group of several.
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
    fn the_roomiest_of_the_named_devices_are_taken() {
        let host =
            |gib| Arc::new(HostDevice::new(HostConfig::new(Bytes::gib(gib))).expect("a host")) as Arc<dyn Device>;
        let found = |of: DeviceChoice| {
            let mut found = Candidates { of, opened: [2, 12, 11, 12].map(host).to_vec() };
            let free = found.arrange().expect("they say what is free");
            move |ranks| {
                format!("{:?}", Candidates { of: found.of.clone(), opened: found.opened.clone() }.first(&free, ranks))
            }
        };
        let named = found(DeviceChoice::CudaRanks(vec![4, 5, 6, 7]));
        assert_eq!([1, 2, 4].map(named), ["Cuda(5)", "CudaRanks([5, 7])", "CudaRanks([4, 5, 6, 7])"]);
        // They are alike.
        assert!(found(DeviceChoice::HostRanks(4, Bytes::gib(1)))(2).starts_with("HostRanks(2"));
    }

    #[test]
    fn a_device_that_is_named_and_not_there_is_told_of() {
        let of = DeviceChoice::CudaRanks(vec![61, 62]);
        assert!(matches!(
            Candidates::roomiest_of(of),
            Err(DeviceError::NoDevice { .. } | DeviceError::Unusable { .. })
        ));
        let twice = Candidates::roomiest_of(DeviceChoice::CudaRanks(vec![0, 0])).map(drop).expect_err("it is one");
        assert!(twice.to_string().contains("names a GPU twice"), "{twice}");
    }
}
