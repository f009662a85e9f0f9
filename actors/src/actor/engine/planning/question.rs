//! Pure: all inputs that determine a start, and the KV cache that results from them.

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{Envelope, Model, checkpoint::Checkpoint, processor::ImageProcessor};

use super::Shortfall;
use crate::{
    compute::memory::KvMemory,
    engine::{EffectiveLimits, LoadOptions, ModelBounds, StartError},
    profile::{KvCapacity, KvChoice, MemoryRequirements, MemoryState},
};

/// All inputs that determine a start.
#[derive(Clone, Copy)]
pub struct Question<'q> {
    /// The model, planned or loaded.
    pub model: &'q Model,
    /// The processor that resizes the model's pictures. `None` for a model without pictures.
    pub pictures: Option<&'q ImageProcessor>,
    /// The checkpoint of the model. `None` if other formats of its weights need not be suggested.
    pub checkpoint: Option<&'q Checkpoint>,
    /// The target that the model would run on.
    pub target: Target,
    /// The options that the model would be loaded with.
    pub options: &'q LoadOptions,
    /// The device's memory as the model would find it.
    pub place: MemoryState,
}

impl<'q> Question<'q> {
    /// Bounds of the model's inputs before the user sets any limits.
    pub fn own(&self) -> ModelBounds<'q> {
        ModelBounds { family: self.model.config(), pictures: self.pictures, is_host: self.place.is_host }
    }

    /// The largest inputs, and the memory that the model needs for them.
    ///
    /// # Errors
    /// The errors of [`LoadOptions::lowered`], and [`StartError::Plan`].
    pub fn needs(&self) -> Result<(EffectiveLimits, MemoryRequirements), StartError> {
        self.needs_with(&self.options.kv())
    }

    /// Like [`needs`](Self::needs), with another choice of the size of the KV cache.
    pub(super) fn needs_with(&self, kv: &KvChoice) -> Result<(EffectiveLimits, MemoryRequirements), StartError> {
        let mut inputs = self.options.lowered(&self.own())?;
        let plan = |envelope: &Envelope| MemoryRequirements::plan(self.model, self.target, envelope, self.place.page);
        let mut needs = plan(&inputs.envelope)?;
        if let Some(sequences) = self.sequences_that_leave_kv(&inputs.envelope, &needs, kv) {
            inputs.envelope.sequences = sequences;
            needs = plan(&inputs.envelope)?;
        }
        Ok((inputs, needs.with_host(self.options.swap_space)))
    }

    /// A lower number of sequences, for a model with recurrent states whose default number would
    /// leave too little memory for keys and values. Each sequence then has memory for its state
    /// and, unless `kv` fixes the size of the KV cache, for [`EXPECTED_TOKENS`] tokens. `None` if
    /// the default fits, or if the user set the number.
    fn sequences_that_leave_kv(&self, envelope: &Envelope, needs: &MemoryRequirements, kv: &KvChoice) -> Option<usize> {
        let is_set = self.options.limits.sequences.is_some() || self.options.envelope.is_some();
        let states = needs.states.filter(|_| !is_set)?;
        let of_state = states.shape.sequence_bytes();
        let spare = of_state * states.spare as u64;
        let fixed = needs.memory_plan().total().saturating_sub(needs.state_bytes() + needs.probe());
        let (shape, page) = (needs.kv_shape, self.place.page);
        let (of_kv, of_sequence) = match kv.pinned_tokens(shape, page) {
            Some(_) => (KvMemory::bytes(shape, least_blocks(needs, kv, page), page), of_state),
            None => {
                let tokens = EXPECTED_TOKENS.min(envelope.context_tokens);
                (Bytes::ZERO, of_state + shape.token_bytes() * tokens as u64)
            }
        };
        let left = self.place.available().saturating_sub(fixed).saturating_sub(spare).saturating_sub(of_kv);
        let fitting = (left / of_sequence) as usize;
        let rounded = if fitting < SEQUENCES_STEP { fitting.max(1) } else { fitting / SEQUENCES_STEP * SEQUENCES_STEP };
        (rounded < envelope.sequences).then_some(rounded)
    }
}

/// Tokens of KV cache planned for each sequence of a model with recurrent states when all sequences
/// run: the length of a long chat. With shorter sequences, all state slots are in use and some KV
/// blocks are free. With longer sequences, fewer sequences run, and the slots of the other
/// sequences hold snapshots.
const EXPECTED_TOKENS: usize = 8192;

/// Lowered numbers of sequences are multiples of this number, unless fewer fit. A few more or fewer
/// free bytes at a later start then give the same number, so the recorded profile still applies.
const SEQUENCES_STEP: usize = 8;

/// The smallest number of KV cache blocks for a start: the size that the user fixed, or the size of
/// the small KV cache that a start creates first (the probe), whichever is larger.
pub(super) fn least_blocks(needs: &MemoryRequirements, kv: &KvChoice, page: Bytes) -> usize {
    let pinned = kv.pinned_tokens(needs.kv_shape, page).unwrap_or(0);
    pinned.div_ceil(BLOCK_TOKENS).max(needs.probe_blocks)
}

/// Returns the KV cache blocks of a start, computed with the same arithmetic as an attempt.
pub(super) fn settle(
    needs: &MemoryRequirements,
    envelope: &Envelope,
    kv: &KvChoice,
    place: &MemoryState,
) -> Result<usize, Shortfall> {
    let (shape, page, available) = (needs.kv_shape, place.page, place.available());
    let needed = needs.memory_plan_with(least_blocks(needs, kv, page)).total();
    if let Some(short_by) = needed.checked_sub(available).filter(|short_by| !short_by.is_zero()) {
        return Err(Shortfall::Memory { needed, available, short_by });
    }
    let (claimed, probe) = (needs.memory_plan().total(), needs.probe());
    let outside_pool = place.overhead.saturating_add(claimed).saturating_sub(probe);
    let left = available.saturating_sub(claimed);
    let capacity = KvCapacity { total: place.total, outside_pool, available: left, probe, is_host: place.is_host };
    let blocks = kv.sizing(&capacity, shape, page).blocks(shape, page);
    if let Some(tokens) = needs.too_few_tokens(blocks, envelope) {
        return Err(Shortfall::Tokens { tokens, context_tokens: envelope.context_tokens });
    }
    let blocks = blocks.max(needs.probe_blocks);
    debug_assert!(
        KvMemory::bytes(shape, blocks, page) <= left + probe,
        "the KV share does not exceed the remaining memory"
    );
    Ok(blocks)
}
