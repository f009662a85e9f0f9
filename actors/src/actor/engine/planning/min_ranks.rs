//! Search for the smallest number of devices that a model fits on, by planning for one rank, for
//! two ranks, and so on.

use std::fmt;

use bursar_kernels::Target;
use bursar_model::{LoadError, Model, checkpoint::Checkpoint, weights::WeightError};
use serde::Serialize;

use super::{NoRanksFit, Question, RanksShortfall, RanksTried, unfit::listed};
use crate::{
    engine::{LoadOptions, StartError},
    profile::MemoryState,
};

/// The number of devices that a model is split over.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MinRanks {
    pub model: String,
    /// The smallest number of devices that the model fits on.
    pub ranks: usize,
    /// All smaller numbers, with the reason why each is too small.
    pub too_few: Vec<RanksTried>,
}

impl fmt::Display for MinRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ranks {
            1 => write!(f, "{} fits on one device", self.model),
            ranks => write!(f, "{} is split over {ranks} devices ({})", self.model, listed(&self.too_few)),
        }
    }
}

/// A search for the devices of a model.
#[derive(Clone, Copy)]
pub struct PlacementQuery<'q> {
    /// The model's name, for messages.
    pub name: &'q str,
    /// The model's checkpoint, possibly without weights.
    pub checkpoint: &'q Checkpoint,
    /// The options that the model would be loaded with.
    pub options: &'q LoadOptions,
}

impl PlacementQuery<'_> {
    /// Tries one device, two devices, and so on. `at` is called with the number of devices. It
    /// returns the target of a rank and the memory of the device with the least available memory,
    /// or `None` if there are fewer devices.
    ///
    /// # Errors
    /// [`StartError::NoRanksFit`], or any other error of a plan.
    pub fn min_ranks(
        &self,
        mut at: impl FnMut(usize) -> Result<Option<(Target, MemoryState)>, StartError>,
    ) -> Result<MinRanks, StartError> {
        let (model, mut tried) = (self.name.to_owned(), Vec::new());
        while let Some((target, place)) = at(tried.len() + 1)? {
            let ranks = tried.len() + 1;
            match self.shortfall(ranks, target, place)? {
                None => return Ok(MinRanks { model, ranks, too_few: tried }),
                Some(shortfall) => tried.push(RanksTried { ranks, shortfall }),
            }
        }
        Err(NoRanksFit { model, tried }.into())
    }

    /// Returns why the model does not fit on `ranks` devices. `None` if it fits.
    ///
    /// # Errors
    /// Any error of a plan.
    pub fn shortfall(
        &self,
        ranks: usize,
        target: Target,
        place: MemoryState,
    ) -> Result<Option<RanksShortfall>, StartError> {
        let PlacementQuery { checkpoint, options, .. } = *self;
        let model = match Model::plan_heaviest(checkpoint, &target, ranks) {
            Err(LoadError::Weights(cut @ (WeightError::Ranks(_) | WeightError::Cut { .. }))) => {
                return Ok(Some(RanksShortfall::Indivisible(cut.to_string())));
            }
            model => model?,
        };
        let pictures = checkpoint.image_processor.as_ref();
        let question = Question { model: &model, pictures, checkpoint: None, target, options, place };
        let (inputs, needs) = question.needs()?;
        Ok(question.kv_blocks(&inputs, &needs).err().map(RanksShortfall::OnEach))
    }
}

#[cfg(test)]
mod tests {
    use bursar_budgets::{Bytes, Hint};
    use bursar_model::demo;

    use super::*;
    use crate::engine::Shortfall;

    const CPU: Target = Target::Cpu { threads: 1 };

    /// The result of a search among `found` devices, each with `capacity` bytes.
    fn min_ranks(found: usize, capacity: Bytes) -> Result<MinRanks, StartError> {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let options = LoadOptions { kv_tokens: Some(16384), ..LoadOptions::small() };
        let sought = PlacementQuery { name: "demo", checkpoint: &checkpoint, options: &options };
        let place = MemoryState { is_host: true, ..MemoryState::of_available(capacity, Bytes::kib(64)) };
        sought.min_ranks(|ranks| Ok((ranks <= found).then_some((CPU, place))))
    }

    /// The memory that the demo model needs on each of `ranks` devices.
    fn needed(ranks: usize) -> Bytes {
        let error = min_ranks(ranks, Bytes::mib(1)).expect_err("no model fits 1 MiB");
        let StartError::NoRanksFit(NoRanksFit { tried, .. }) = error else { panic!("{error:?}") };
        let RanksTried { shortfall: RanksShortfall::OnEach(Shortfall::Memory { needed, .. }), .. } = tried[ranks - 1]
        else {
            panic!("{tried:?}")
        };
        needed
    }

    #[test]
    fn a_model_is_split_over_the_fewest_ranks_that_fit() {
        let (whole, half) = (needed(1), needed(2));
        assert!(half < whole);
        let of = |capacity| min_ranks(4, capacity).expect("the model fits");
        assert_eq!(of(whole), MinRanks { model: "demo".into(), ranks: 1, too_few: vec![] });
        let shared = of(whole - Bytes(1));
        assert_eq!((shared.ranks, shared.too_few.len()), (2, 1));
        assert_eq!(shared.to_string(), "demo is split over 2 devices (1: 1 B (1 B) short)");
        assert_eq!(of(half).ranks, 2);
    }

    #[test]
    fn an_unfit_model_reports_the_shortfall_for_each_rank_count() {
        let (whole, half) = (needed(1), needed(2));
        let error = min_ranks(3, half - Bytes(1)).expect_err("two heads allow at most two ranks");
        let message = error.to_string();
        let short = whole - half + Bytes(1);
        assert!(
            message.contains(&format!("(1: {} ({short}) short; 2: 1 B (1 B) short on each; 3: ", short.exact())),
            "{message}"
        );
        assert!(message.contains("3: key heads cannot be divided among 3 ranks: there are 2"), "{message}");
        assert!(error.hint().contains("bursar plan"), "{}", error.hint());
    }
}
