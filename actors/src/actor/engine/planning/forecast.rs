//! Pure: forecast of a start, computed from a plan and without the device.

use bursar_budgets::{Bytes, Class, MemoryPlan};
use bursar_kernels::BLOCK_TOKENS;
use bursar_model::flow::CacheGroups;

use super::{
    Question, Shortfall, Unfit,
    question::{least_blocks, settle},
};
use crate::{
    engine::{EffectiveLimits, StartError},
    profile::MemoryRequirements,
};

impl Question<'_> {
    /// Returns the KV cache tokens of a start. `None` if the model does not fit. Unlike
    /// [`Forecast::of`], this method does not look for changes that would help.
    ///
    /// # Errors
    /// The errors of [`needs`](Self::needs).
    pub fn kv_tokens(&self) -> Result<Option<usize>, StartError> {
        let (inputs, needs) = self.needs()?;
        Ok(self.kv_blocks(&inputs, &needs).ok().map(|blocks| blocks * BLOCK_TOKENS))
    }

    /// Returns the KV cache blocks of a start with `needs`.
    ///
    /// # Errors
    /// The resource that is missing. Unlike [`settled`](Self::settled), this method does not look
    /// for changes that would help.
    pub fn kv_blocks(&self, inputs: &EffectiveLimits, needs: &MemoryRequirements) -> Result<usize, Shortfall> {
        settle(needs, &inputs.envelope, &self.options.kv(), &self.place)
    }

    /// Like [`kv_blocks`](Self::kv_blocks), with suggestions in the error.
    ///
    /// # Errors
    /// The reason why the start will not become READY, and the changes that would help. Finding
    /// these changes takes a few hundred plans.
    pub fn settled(&self, inputs: &EffectiveLimits, needs: &MemoryRequirements) -> Result<usize, Box<Unfit>> {
        let found = self.kv_blocks(inputs, needs);
        found.map_err(|shortfall| Box::new(Unfit { shortfall, suggestions: self.suggestions(inputs, needs) }))
    }
}

/// The expected result of a start.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// The largest inputs, lowered to the model's limits.
    pub inputs: EffectiveLimits,
    /// The attention layers, in groups that share block tables.
    pub cache_groups: CacheGroups,
    /// KV cache tokens at READY. Each token counts once in each cache group. 0 if the model does
    /// not fit.
    pub kv_tokens: usize,
    /// The memory plan, with one line per claimant. If the model fits, the KV cache has its size at
    /// READY. Otherwise the KV cache has the minimum size, or the size that the user fixed.
    pub plan: MemoryPlan,
    /// Bytes of the device that can be leased.
    pub available: Bytes,
    /// Bytes that remain after all claimants and the canary. 0 if the model does not fit.
    pub free: Bytes,
    /// Why the model will not become READY even if no other process takes memory. `None` if it will
    /// become READY.
    pub unfit: Option<Box<Unfit>>,
}

impl Forecast {
    /// Computes the forecast. If the model does not fit, the search for changes that would help
    /// takes a few hundred plans.
    ///
    /// # Errors
    /// Limits that contradict each other, or tensor shapes that do not match.
    pub fn of(question: &Question<'_>) -> Result<Self, StartError> {
        let ((inputs, needs), available) = (question.needs()?, question.place.available());
        let forecast = |blocks, kv_tokens, unfit: Option<Box<Unfit>>| {
            let plan = needs.memory_plan_with(blocks);
            let free = if unfit.is_some() { Bytes::ZERO } else { available.saturating_sub(plan.total()) };
            let cache_groups = needs.cache_groups.clone();
            Forecast { inputs: inputs.clone(), cache_groups, kv_tokens, plan, available, free, unfit }
        };
        Ok(match question.settled(&inputs, &needs) {
            Ok(blocks) => forecast(blocks, blocks * BLOCK_TOKENS, None),
            Err(unfit) => forecast(least_blocks(&needs, &question.options.kv(), question.place.page), 0, Some(unfit)),
        })
    }

    /// Whether the model will become READY if no other process takes memory.
    pub fn fits(&self) -> bool {
        self.unfit.is_none()
    }

    /// Returns how many sequences can run at once if each has `tokens` tokens, prompt and reply
    /// together. The result is limited by the number of blocks and by `sequences`.
    pub fn concurrency(&self, tokens: usize, sequences: usize) -> usize {
        let (blocks, step_tokens) = (self.kv_tokens / BLOCK_TOKENS, self.inputs.envelope.step_tokens);
        self.cache_groups.sequences_in(blocks, tokens, step_tokens).min(sequences)
    }

    pub fn of_class(&self, class: &Class) -> Bytes {
        self.plan.of_class(class)
    }
}
