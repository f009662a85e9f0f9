//! Placement of models on devices, for machines with more devices than one model needs. Each model
//! gets separate devices while unused devices remain. Later models join the devices that have the
//! most memory left.

use std::{cmp::Reverse, num::NonZeroUsize};

use bursar_budgets::{Bytes, DeviceError};
use bursar_model::Model;

use super::{
    DeviceChoice, ModelSource, RuntimeError,
    device_search::{Candidates, Planned, most_free_first},
};
use crate::engine::{LoadOptions, StartError};

/// Models to place on devices.
#[derive(Clone)]
pub struct PlacementRequest {
    /// The devices to choose from: the devices of [`DeviceChoice::CudaRanks`] or
    /// [`DeviceChoice::HostRanks`] or, with [`DeviceChoice::Auto`], the first eight GPUs. With any
    /// other choice, all models share the chosen device.
    pub of: DeviceChoice,
    /// Number of devices over which to shard a model that does not set [`LoadOptions::ranks`].
    /// `None` means the fewest devices on which the model fits.
    pub ranks: Option<usize>,
    pub models: Vec<(ModelSource, LoadOptions)>,
    /// Bytes that each device keeps free on purpose. `None` for the default.
    pub canary: Option<Bytes>,
}

/// Devices and the models that they serve: the input to start one [`Runtime`](super::Runtime).
#[derive(Clone, Debug)]
pub struct Placement {
    /// The value to set in [`RuntimeConfig::device`](super::RuntimeConfig::device).
    pub device: DeviceChoice,
    /// Number of devices over which the models are sharded.
    pub ranks: usize,
    /// Indices into [`PlacementRequest::models`], in ascending order.
    pub models: Vec<usize>,
}

/// The devices and the memory that a model needs.
#[derive(Clone, Debug)]
struct Requirement {
    devices: usize,
    weights: Bytes,
    /// Device counts over which the model can be sharded.
    cuts: Vec<usize>,
}

/// Devices, by number, and the models that they serve, by index.
#[derive(Debug, PartialEq)]
struct Group {
    devices: Vec<usize>,
    models: Vec<usize>,
}

impl PlacementRequest {
    /// Finds the devices of each model. Reads the models' settings, and keeps devices open while it
    /// examines them.
    ///
    /// # Errors
    /// A device cannot be opened, or a model is to be sharded over more devices than there are.
    /// Problems with a model are reported when it is loaded.
    pub async fn place(self) -> Result<Vec<Placement>, RuntimeError> {
        let placed = tokio::task::spawn_blocking(move || self.placed()).await;
        placed.map_err(|died| RuntimeError::Spawn(died.to_string()))?
    }

    fn placed(self) -> Result<Vec<Placement>, RuntimeError> {
        let (found, free) = Candidates::most_free_of(self.of.clone())?;
        if found.opened.is_empty() {
            let ranks = self.ranks.unwrap_or(1);
            return Ok(vec![Placement { device: self.of, ranks, models: (0..self.models.len()).collect() }]);
        }
        let count = found.opened.len();
        let mut requested =
            self.models.iter().filter_map(|(_, options)| options.ranks.map(NonZeroUsize::get)).chain(self.ranks);
        if let Some(ranks) = requested.find(|ranks| !(1..=count).contains(ranks)) {
            let reason = format!("a model is to use {ranks} devices; expected 1 to {count}");
            let hint = "name more devices, or split models over fewer".to_owned();
            return Err(DeviceError::NoDevice { reason, hint }.into());
        }
        let needs = self.models.iter().map(|(source, options)| {
            let planned = found.planned(source, options).ok().flatten();
            let min_ranks = |planned| match found.min_ranks_of(planned, source, options, self.canary) {
                Ok(min_ranks) => min_ranks.ranks,
                Err(StartError::NoRanksFit(_)) => count,
                Err(_) => 1,
            };
            let devices = options
                .ranks
                .map(NonZeroUsize::get)
                .or(self.ranks)
                .unwrap_or_else(|| planned.as_ref().map_or(1, min_ranks));
            Requirement::of(devices, planned, count)
        });
        let needs: Vec<Requirement> = needs.collect();
        let placement =
            |Group { devices, models }| Placement { ranks: devices.len(), device: found.these(&devices), models };
        Ok(spread(&needs, &free).into_iter().map(placement).collect())
    }
}

impl Requirement {
    /// Returns the requirement of a model. If the model cannot be planned, its weights count as 0
    /// bytes, and loading it reports the reason.
    fn of(devices: usize, planned: Option<Planned>, count: usize) -> Self {
        let weights = |ranks: usize| {
            let Planned { checkpoint, target } = planned.as_ref()?;
            let heaviest = Model::plan_heaviest(checkpoint, target, ranks).ok()?;
            Some(Bytes(heaviest.weight_bytes().0 * ranks as u64))
        };
        let cuts = (1..=count).filter(|ranks| weights(*ranks).is_some()).collect();
        Requirement { devices, weights: weights(devices).unwrap_or(Bytes::ZERO), cuts }
    }

    fn can_join(&self, group: &Group) -> bool {
        let ranks = group.devices.len();
        ranks == self.devices || ranks > self.devices && self.cuts.contains(&ranks)
    }
}

/// Returns groups of devices and their models. A group has as many devices as its first model
/// needs. Models are placed in descending order of the number of devices that they need, and then
/// of their weights. `free` has the free bytes of each device. Unused devices with the most free
/// memory are taken first. If too few unused devices remain for a model, the model joins an
/// existing group over which it can be sharded. If there are several such groups, the model joins
/// the group that has the most memory left after the weights of its models.
fn spread(needs: &[Requirement], free: &[Bytes]) -> Vec<Group> {
    debug_assert!(needs.iter().all(|need| need.devices <= free.len()), "each model fits on all devices together");
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|model| (Reverse((needs[*model].devices, needs[*model].weights)), *model));
    let mut unused = most_free_first(free);
    let mut groups: Vec<Group> = Vec::new();
    for model in order {
        let need = &needs[model];
        let left = |group: &Group| {
            let weights: u64 = group.models.iter().map(|model| needs[*model].weights.0).sum();
            let least = group.devices.iter().map(|device| free[*device].0).min().unwrap_or(0);
            least.saturating_sub(weights / group.devices.len() as u64)
        };
        let joinable = groups.iter_mut().filter(|group| need.can_join(group));
        match joinable.max_by_key(|group| (left(group), Reverse(group.devices[0]))) {
            Some(group) if unused.len() < need.devices => group.models.push(model),
            _ if unused.len() >= need.devices => {
                let mut devices: Vec<usize> = unused.drain(..need.devices).collect();
                devices.sort_unstable();
                groups.push(Group { devices, models: vec![model] });
            }
            // The model cannot be sharded over any group. The model joins the first group, which
            // was created for the largest model. Loading the model then reports the reason.
            _ => groups[0].models.push(model),
        }
    }
    groups.iter_mut().for_each(|group| group.models.sort_unstable());
    groups.sort_by_key(|group| group.devices[0]);
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(devices: usize, gib: u64) -> Requirement {
        Requirement { devices, weights: Bytes::gib(gib), cuts: (1..9).collect() }
    }

    /// Returns the devices and models of each group.
    fn spread_over(devices: usize, needs: &[Requirement]) -> Vec<(Vec<usize>, Vec<usize>)> {
        let groups = spread(needs, &vec![Bytes::gib(80); devices]);
        groups.into_iter().map(|group| (group.devices, group.models)).collect()
    }

    #[test]
    fn each_model_gets_separate_devices_while_free_devices_remain() {
        assert_eq!(spread_over(2, &[of(1, 15), of(1, 7)]), [(vec![0], vec![0]), (vec![1], vec![1])]);
        assert_eq!(spread_over(4, &[of(1, 15), of(2, 140)]), [(vec![0, 1], vec![1]), (vec![2], vec![0])]);
        assert_eq!(
            spread_over(8, &[of(2, 140)]),
            [(vec![0, 1], vec![0])],
            "models on other devices stay where they are"
        );
    }

    #[test]
    fn further_models_are_placed_where_most_memory_is_free() {
        assert_eq!(spread_over(2, &[of(1, 7), of(1, 15), of(1, 3)]), [(vec![0], vec![1]), (vec![1], vec![0, 2])]);
        // A model that fits on one device is sharded over both devices if these form one group.
        assert_eq!(spread_over(2, &[of(1, 7), of(2, 140)]), [(vec![0, 1], vec![0, 1])]);
        assert_eq!(
            spread_over(3, &[of(2, 140), of(2, 140)]),
            [(vec![0, 1], vec![0, 1])],
            "one free device is too few for the model"
        );
        // The weights are 70 GiB on each of two devices, and 75 GiB on a third. The `odd` model
        // cannot be sharded over two devices, like a model with nine heads.
        let odd = Requirement { cuts: vec![1, 3], ..of(1, 1) };
        let needs = [of(2, 140), of(1, 75), of(1, 2)];
        assert_eq!(spread_over(3, &needs), [(vec![0, 1], vec![0, 2]), (vec![2], vec![1])]);
        let needs = [of(2, 140), of(1, 75), odd];
        assert_eq!(spread_over(3, &needs), [(vec![0, 1], vec![0]), (vec![2], vec![1, 2])]);
    }

    #[test]
    fn devices_are_sorted_by_free_memory_except_near_ties() {
        let free = [10 << 10, (80 << 10) - 2, 80 << 10, (80 << 10) - 1].map(Bytes::mib);
        let groups = spread(&[of(1, 15), of(1, 3)], &free);
        assert_eq!(groups[0], Group { devices: vec![1], models: vec![0] });
        assert_eq!(groups[1], Group { devices: vec![2], models: vec![1] });
        assert_eq!(most_free_first(&free), [1, 2, 3, 0]);
    }

    proptest! {
        #[test]
        fn every_model_is_placed_once_on_its_required_devices(
            needs in prop::collection::vec((1..5usize, 0..200u64), 1..12),
            free in prop::collection::vec(0..80u64, 4..9),
        ) {
            let needs: Vec<Requirement> = needs.into_iter().map(|(devices, gib)| of(devices, gib)).collect();
            let free: Vec<Bytes> = free.into_iter().map(Bytes::gib).collect();
            let groups = spread(&needs, &free);
            let mut devices: Vec<usize> = groups.iter().flat_map(|group| group.devices.clone()).collect();
            devices.sort_unstable();
            let count = devices.len();
            devices.dedup();
            prop_assert!(devices.len() == count && devices.iter().all(|device| *device < free.len()));
            let mut models: Vec<usize> = groups.iter().flat_map(|group| group.models.clone()).collect();
            models.sort_unstable();
            prop_assert_eq!(models, (0..needs.len()).collect::<Vec<_>>());
            for group in &groups {
                prop_assert!(group.models.iter().all(|model| needs[*model].can_join(group)));
            }
            let wanted: usize = needs.iter().map(|need| need.devices).sum();
            prop_assert!(wanted > free.len() || groups.len() == needs.len(), "each model has separate devices");
        }
    }
}
