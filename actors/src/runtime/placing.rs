//! Which devices serve which models, where there are more devices than a model needs: a model has devices of its own
//! while there are some, and then goes where the fewest bytes of weights are.

use bursar_budgets::Bytes;
use bursar_model::Model;

use super::{
    DeviceChoice, FewestFor, ModelSource, RuntimeError,
    fewest::{Found, Planned},
};
use crate::engine::{LoadOptions, StartError};

/// Models to be placed on devices.
#[derive(Clone)]
pub struct Placing {
    /// The devices to choose from: those that are named, or with [`DeviceChoice::Auto`] every GPU. One that its caller
    /// makes serves all models.
    pub of: DeviceChoice,
    /// How many devices share each model out; none: as few as it fits on.
    pub ranks: Option<usize>,
    /// The models, with their options.
    pub models: Vec<(ModelSource, LoadOptions)>,
    /// Bytes that each device keeps free on purpose, if not the usual.
    pub canary: Option<Bytes>,
}

/// Devices, and the models that they serve: a [`Runtime`](super::Runtime) to start.
#[derive(Clone, Debug)]
pub struct Placement {
    /// For [`RuntimeConfig::device`](super::RuntimeConfig::device).
    pub device: DeviceChoice,
    /// Which of the models, in their order.
    pub models: Vec<usize>,
}

/// What a model takes.
#[derive(Clone, Copy, Debug)]
struct Need {
    devices: usize,
    weights: Bytes,
}

/// Devices by number, and models by number.
#[derive(Debug, PartialEq)]
struct Group {
    devices: Vec<usize>,
    models: Vec<usize>,
}

impl Placing {
    /// Finds each model's devices. It reads the models' settings, and opens devices for as long as it looks at them.
    ///
    /// # Errors
    /// A device cannot be opened; without a number of `ranks`, also if no number does for a model or if one cannot be
    /// planned. With a number, that is told when the model is loaded.
    pub async fn place(self) -> Result<Vec<Placement>, RuntimeError> {
        let placed = tokio::task::spawn_blocking(move || self.placed()).await;
        Ok(placed.map_err(|died| RuntimeError::Spawn(died.to_string()))?.map_err(std::sync::Arc::new)?)
    }

    fn placed(self) -> Result<Vec<Placement>, StartError> {
        let mut found = Found::of(self.of.clone());
        let needs = self.models.iter().map(|(source, options)| match self.ranks {
            Some(ranks) => {
                let planned = found.planned(source, options).ok().flatten();
                Ok(Need { devices: ranks, weights: weights(planned, ranks) })
            }
            None => {
                let devices = found.fewest(source, options, self.canary)?.ranks;
                Ok(Need { devices, weights: weights(found.planned(source, options)?, devices) })
            }
        });
        let needs = needs.collect::<Result<Vec<Need>, StartError>>()?;
        // No more than all have of their own.
        let wanted = needs.iter().map(|need| need.devices).sum();
        while found.opened.len() < wanted && found.open_one()? {}
        if let Some(missing) = found.missing(wanted) {
            // Opening it says what is wrong.
            missing.open()?;
        }
        if found.opened.is_empty() {
            return Ok(vec![Placement { device: self.of, models: (0..needs.len()).collect() }]);
        }
        let free = found.opened.iter().map(|device| Ok(device.memory()?.free));
        let groups = spread(&needs, &free.collect::<Result<Vec<Bytes>, StartError>>()?);
        let placement = |Group { devices, models }: Group| {
            let of = found.these(&devices);
            let device = match self.ranks {
                Some(_) => of,
                None => {
                    let models = models.iter().map(|model| self.models[*model].clone()).collect();
                    DeviceChoice::Fewest(Box::new(FewestFor { of, models }))
                }
            };
            Placement { device, models }
        };
        Ok(groups.into_iter().map(placement).collect())
    }
}

/// Bytes of a model's weights on all of `ranks` devices; none if it cannot be planned so, which loading it says.
fn weights(planned: Option<Planned>, ranks: usize) -> Bytes {
    let heaviest =
        planned.and_then(|Planned { checkpoint, target }| Model::plan_heaviest(&checkpoint, &target, ranks).ok());
    Bytes(heaviest.map_or(0, |model| model.weight_bytes().0 * ranks as u64))
}

/// Groups of devices, each as many as its first model needs, and their models. Models come in the order of the devices
/// that they need, then of their weights, the largest first. `free` has the bytes that each device has; of devices without
/// models those with the most are taken. A model for which there are too few of those joins the group, of all that are
/// large enough, whose devices have the fewest bytes of weights.
fn spread(needs: &[Need], free: &[Bytes]) -> Vec<Group> {
    debug_assert!(needs.iter().all(|need| need.devices <= free.len()), "each fits on all of them");
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|model| (std::cmp::Reverse((needs[*model].devices, needs[*model].weights)), *model));
    let mut unused: Vec<usize> = (0..free.len()).collect();
    unused.sort_by_key(|device| (std::cmp::Reverse(free[*device]), *device));
    let mut groups: Vec<Group> = Vec::new();
    for model in order {
        let Need { devices, .. } = needs[model];
        let load = |group: &Group| {
            let weights: u64 = group.models.iter().map(|model| needs[*model].weights.0).sum();
            weights / group.devices.len() as u64
        };
        let large_enough = groups.iter_mut().filter(|group| group.devices.len() >= devices);
        match large_enough.min_by_key(|group| load(group)) {
            Some(group) if unused.len() < devices => group.models.push(model),
            _ => {
                let mut devices: Vec<usize> = unused.drain(..devices).collect();
                devices.sort_unstable();
                groups.push(Group { devices, models: vec![model] });
            }
        }
    }
    groups.iter_mut().for_each(|group| group.models.sort_unstable());
    groups.sort_by_key(|group| group.devices.first().copied());
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(devices: usize, gib: u64) -> Need {
        Need { devices, weights: Bytes::gib(gib) }
    }

    /// Devices and models of each group.
    fn spread_over(devices: usize, needs: &[Need]) -> Vec<(Vec<usize>, Vec<usize>)> {
        let groups = spread(needs, &vec![Bytes::gib(80); devices]);
        groups.into_iter().map(|group| (group.devices, group.models)).collect()
    }

    #[test]
    fn each_model_has_devices_of_its_own_while_there_are_some() {
        assert_eq!(spread_over(2, &[of(1, 15), of(1, 7)]), [(vec![0], vec![0]), (vec![1], vec![1])]);
        assert_eq!(spread_over(4, &[of(1, 15), of(2, 140)]), [(vec![0, 1], vec![1]), (vec![2], vec![0])]);
        assert_eq!(spread_over(8, &[of(2, 140)]), [(vec![0, 1], vec![0])], "others are left alone");
    }

    #[test]
    fn further_models_go_where_the_fewest_weights_are() {
        assert_eq!(spread_over(2, &[of(1, 7), of(1, 15), of(1, 3)]), [(vec![0], vec![1]), (vec![1], vec![0, 2])]);
        // A model that fits one device is shared out where all devices share.
        assert_eq!(spread_over(2, &[of(1, 7), of(2, 140)]), [(vec![0, 1], vec![0, 1])]);
        assert_eq!(spread_over(3, &[of(2, 140), of(2, 140)]), [(vec![0, 1], vec![0, 1])], "one is too few for it");
    }

    #[test]
    fn a_device_that_a_neighbour_holds_comes_last() {
        let free = [Bytes::gib(10), Bytes::gib(79), Bytes::gib(80)];
        let groups = spread(&[of(1, 15), of(1, 3)], &free);
        assert_eq!(groups[0], Group { devices: vec![1], models: vec![1] });
        assert_eq!(groups[1], Group { devices: vec![2], models: vec![0] });
    }

    proptest! {
        #[test]
        fn every_model_is_placed_once_on_as_many_devices_as_it_needs(
            needs in prop::collection::vec((1..5usize, 0..200u64), 1..12),
            free in prop::collection::vec(0..80u64, 4..9),
        ) {
            let needs: Vec<Need> = needs.into_iter().map(|(devices, gib)| of(devices, gib)).collect();
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
                prop_assert!(group.models.iter().all(|model| needs[*model].devices <= group.devices.len()));
            }
            let wanted: usize = needs.iter().map(|need| need.devices).sum();
            prop_assert!(wanted > free.len() || groups.len() == needs.len(), "all have devices of their own");
        }
    }
}
