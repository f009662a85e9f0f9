//! A runtime on as few devices as its models fit on, which is known only after they are planned.

use std::{fmt, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, HostConfig, HostDevice};
use bursar_kernels::Target;
use bursar_model::{
    checkpoint::{Checkpoint, CheckpointSource},
    error::CheckpointError,
    registry,
};

use super::{DeviceChoice, ModelSource, device::group};
use crate::{
    compute::Processor,
    engine::{FewestRanks, LoadOptions, Sought, StartError},
    profile::Place,
};

/// As few of some devices as each of these models fits on, by plan, and as its heads allow.
#[derive(Clone)]
pub struct FewestFor {
    /// The devices to choose from, of which the first are taken: those that are named, or with [`DeviceChoice::Auto`]
    /// every GPU. One that its caller makes is taken as it is.
    pub of: DeviceChoice,
    /// The models that the runtime will load, with their options, each planned as if alone. The one that needs the most
    /// devices decides.
    pub models: Vec<(ModelSource, LoadOptions)>,
}

impl fmt::Debug for FewestFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} for {:?}", self.of, self.models.iter().map(|(source, _)| source.name()).collect::<Vec<_>>())
    }
}

/// The devices that may be taken, opened one after the other as larger numbers are tried.
pub(super) struct Found {
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

impl FewestFor {
    /// The device to take, and what each model says of it. It reads the models' settings, and opens devices.
    pub(super) fn choose(self, canary: Option<Bytes>) -> Result<(DeviceChoice, Vec<FewestRanks>), StartError> {
        let (of, _) = self.of.chosen(canary)?;
        let mut found = Found::of(of);
        let chosen: Vec<_> = self
            .models
            .iter()
            .map(|(source, options)| found.fewest(source, options, canary))
            .collect::<Result<_, _>>()?;
        let ranks = chosen.iter().map(|model| model.ranks).max().unwrap_or(1);
        Ok((found.first(ranks), chosen))
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

impl Found {
    /// None is open yet.
    pub(super) fn of(of: DeviceChoice) -> Self {
        Found { of, opened: Vec::new() }
    }

    /// Opens one more device. False if there is no other.
    pub(super) fn open_one(&mut self) -> Result<bool, DeviceError> {
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
    pub(super) fn missing(&self) -> Option<DeviceChoice> {
        let named = match &self.of {
            DeviceChoice::CudaRanks(ordinals) => ordinals.len(),
            DeviceChoice::Cuda(_) => 1,
            _ => 0,
        };
        let next = self.opened.len();
        (next < named).then(|| self.these(&[next]))
    }

    /// Puts the opened devices in this order, in which numbers of them are tried.
    pub(super) fn arrange(&mut self, numbers: &[usize]) {
        self.opened = numbers.iter().map(|number| self.opened[*number].clone()).collect();
    }

    /// A model as the first of them would compute it. None if there is none: a device that the caller has made, or no such
    /// GPU, which opening it will say.
    pub(super) fn planned(
        &mut self,
        source: &ModelSource,
        options: &LoadOptions,
    ) -> Result<Option<Planned>, StartError> {
        let files = source.origin().clone().bring_settings()?;
        let stored = files.stored_type()?;
        let checkpoint = open_settings(files)?.0.with_quantization(options.quantization);
        if self.opened.is_empty() {
            self.open_one()?;
        }
        let Some(first) = self.opened.first() else { return Ok(None) };
        let best = Processor::best_target(first, options.threads)?;
        let target = options.dtype.on(best, stored)?;
        let checkpoint = checkpoint.with_cache(options.kv_cache_dtype.on(&target)?);
        Ok(Some(Planned { checkpoint, target }))
    }

    /// The fewest of them that a model fits on, which is one where none can be looked at.
    fn fewest(
        &mut self,
        source: &ModelSource,
        options: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<FewestRanks, StartError> {
        match self.planned(source, options)? {
            Some(planned) => self.fewest_of(&planned, source, options, canary),
            None => Ok(FewestRanks { model: source.name(), ranks: 1, too_few: Vec::new() }),
        }
    }

    /// The fewest of them that a planned model fits on.
    pub(super) fn fewest_of(
        &mut self,
        planned: &Planned,
        source: &ModelSource,
        options: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<FewestRanks, StartError> {
        let Planned { checkpoint, target } = planned;
        let name = options.name.clone().unwrap_or_else(|| source.name());
        Sought { name: &name, checkpoint, options }.fewest(|ranks| {
            while self.opened.len() < ranks {
                if !self.open_one()? {
                    return Ok(None);
                }
            }
            let places = self.opened[..ranks].iter().map(|device| Place::of_device(&**device, canary));
            let places = places.collect::<Result<Vec<_>, _>>()?;
            let fullest = *places.iter().min_by_key(|place| place.available()).expect("there is one");
            let target = match *target {
                Target::Cpu { threads } => Target::Cpu { threads: (threads / ranks).max(1) },
                gpu @ Target::Cuda(_) => gpu,
            };
            Ok(Some((target, fullest)))
        })
    }

    /// The first `ranks` of them.
    fn first(self, ranks: usize) -> DeviceChoice {
        match (self.of, ranks) {
            (DeviceChoice::HostRanks(_, capacity), 1) => DeviceChoice::Host(capacity),
            (DeviceChoice::HostRanks(_, capacity), ranks) => DeviceChoice::HostRanks(ranks, capacity),
            (DeviceChoice::CudaRanks(ordinals), ranks) => gpus_of(ordinals[..ranks].to_vec()),
            (DeviceChoice::Auto(capacity), ranks) if ranks > 1 => DeviceChoice::AutoRanks(ranks, capacity),
            (one, _) => one,
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
            DeviceChoice::Auto(_) if !self.opened[0].is_host_memory() => gpus_of(numbers.to_vec()),
            one => one.clone(),
        }
    }
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
