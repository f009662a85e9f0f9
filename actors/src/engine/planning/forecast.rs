//! What a start will come to on a device, and what would make it possible: by plan, without a device. Pure.

use bursar_budgets::{Bytes, Class, MemoryPlan};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{Envelope, Model, processor::ImageProcessor};

use super::{Lack, Unfit};
use crate::{
    compute::memory::KvMemory,
    engine::{LoadOptions, Lowered, Own, StartError},
    profile::{KvChoice, KvRoom, Needs, Place},
};

/// All that a start follows from.
#[derive(Clone, Copy)]
pub struct Question<'q> {
    /// The model, planned or loaded.
    pub model: &'q Model,
    /// How its pictures are resized; none if it takes none.
    pub pictures: Option<&'q ImageProcessor>,
    /// What it would be computed with.
    pub target: Target,
    /// What it would be loaded with.
    pub options: &'q LoadOptions,
    /// Where.
    pub place: Place,
}

impl<'q> Question<'q> {
    /// What bounds the model's inputs before anything is said.
    pub fn own(&self) -> Own<'q> {
        Own { family: self.model.config(), pictures: self.pictures, is_host: self.place.is_host }
    }

    /// The largest inputs, and what the model needs for them.
    ///
    /// # Errors
    /// As [`LoadOptions::lowered`]; [`StartError::Plan`].
    pub fn needs(&self) -> Result<(Lowered, Needs), StartError> {
        let inputs = self.options.lowered(&self.own())?;
        let needs = Needs::plan(self.model, self.target, &inputs.envelope, self.place.page)?;
        Ok((inputs, needs))
    }

    /// The blocks of keys and values that a start of `needs` settles on.
    ///
    /// # Errors
    /// Why it will not be READY, with what would help: that takes some hundred plans.
    pub fn settled(&self, inputs: &Lowered, needs: &Needs) -> Result<usize, Box<Unfit>> {
        let settled = settle(needs, &inputs.envelope, &self.options.kv(), &self.place);
        settled.map_err(|lack| Box::new(Unfit { lack, suggestions: self.suggestions(inputs, needs) }))
    }
}

/// What a start will come to.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// The largest inputs, as the model lowers them.
    pub inputs: Lowered,
    /// Tokens of keys and values at READY; none if it does not fit.
    pub kv_tokens: usize,
    /// One line a claimant. Where it fits keys and values have the size that they settle on, else the least that a start
    /// can do with, or what was fixed.
    pub plan: MemoryPlan,
    /// What of the device can be leased.
    pub available: Bytes,
    /// What no claimant has, the canary apart; nothing if it does not fit.
    pub free: Bytes,
    /// Why it will not be READY, even if nobody takes memory meanwhile; none if it will.
    pub unfit: Option<Box<Unfit>>,
}

impl Forecast {
    /// Works it out. Where it does not fit that takes some hundred plans.
    ///
    /// # Errors
    /// Limits that contradict each other; a shape that does not go together.
    pub fn of(question: &Question<'_>) -> Result<Self, StartError> {
        let ((inputs, needs), available) = (question.needs()?, question.place.available());
        let forecast = |blocks, kv_tokens, unfit: Option<Box<Unfit>>| {
            let plan = needs.memory_plan_with(blocks);
            let free = if unfit.is_some() { Bytes::ZERO } else { available.saturating_sub(plan.total()) };
            Forecast { inputs: inputs.clone(), kv_tokens, plan, available, free, unfit }
        };
        Ok(match question.settled(&inputs, &needs) {
            Ok(blocks) => forecast(blocks, blocks * BLOCK_TOKENS, None),
            Err(unfit) => forecast(least_blocks(&needs, &question.options.kv(), question.place.page), 0, Some(unfit)),
        })
    }

    /// Whether it will be READY, if nobody takes memory meanwhile.
    pub fn fits(&self) -> bool {
        self.unfit.is_none()
    }

    /// Sequences that run at once where each has so many tokens, prompt and reply together: as many as keys and values
    /// hold, in whole blocks, and no more than `sequences`.
    pub fn concurrency(&self, tokens: usize, sequences: usize) -> usize {
        (self.kv_tokens / BLOCK_TOKENS / tokens.div_ceil(BLOCK_TOKENS).max(1)).min(sequences)
    }

    /// What all lines of a class sum up to.
    pub fn of_class(&self, class: &Class) -> Bytes {
        self.plan.of_class(class)
    }
}

/// The fewest blocks of keys and values that a start can do with: those of the probe, or of a size that was fixed.
pub(super) fn least_blocks(needs: &Needs, kv: &KvChoice, page: Bytes) -> usize {
    let pinned = kv.pinned_tokens(needs.kv_shape, page).unwrap_or(0);
    pinned.div_ceil(BLOCK_TOKENS).max(needs.probe_blocks)
}

/// The blocks of keys and values that a start settles on: the same arithmetic as an attempt's.
pub(super) fn settle(needs: &Needs, envelope: &Envelope, kv: &KvChoice, place: &Place) -> Result<usize, Lack> {
    let (shape, page, available) = (needs.kv_shape, place.page, place.available());
    let needed = needs.memory_plan_with(least_blocks(needs, kv, page)).total();
    if let Some(short_by) = needed.checked_sub(available).filter(|short_by| !short_by.is_zero()) {
        return Err(Lack::Memory { needed, available, short_by });
    }
    let (claimed, probe) = (needs.memory_plan().total(), needs.probe());
    let beside = place.overhead.saturating_add(claimed).saturating_sub(probe);
    let left = available.saturating_sub(claimed);
    let room = KvRoom { total: place.total, beside, available: left, probe, is_host: place.is_host };
    let blocks = kv.sizing(&room, shape, page).blocks(shape, page);
    let (tokens, context_tokens) = (blocks * BLOCK_TOKENS, envelope.context_tokens);
    if tokens < context_tokens {
        return Err(Lack::Tokens { tokens, context_tokens });
    }
    let blocks = blocks.max(needs.probe_blocks);
    debug_assert!(KvMemory::bytes(shape, blocks, page) <= left + probe, "a share is one of what is left");
    Ok(blocks)
}
