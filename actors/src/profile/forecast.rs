//! What a start will come to on a device, and what would make it possible: by plan, without a device. Pure.

use bursar_budgets::{Bytes, Class, MemoryPlan};
use bursar_kernels::{BLOCK_TOKENS, KernelError, Target};
use bursar_model::{Envelope, Model};

use super::{KvChoice, KvRoom, Needs, Suggestion, suggestion};
use crate::memory::KvMemory;

/// A device as a model finds it: its memory, and what of that is somebody's already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device's memory.
    pub total: Bytes,
    /// What our process uses outside leases.
    pub overhead: Bytes,
    /// What others hold: other processes, and other leases of this one.
    pub foreign: Bytes,
    /// What is kept free of use; none for what a runtime keeps by default.
    pub canary: Option<Bytes>,
    /// The page that memory is taken in.
    pub page: Bytes,
    /// Whether host memory stands in for a GPU.
    pub is_host: bool,
}

impl Place {
    /// Nothing but so many bytes to be had.
    pub fn of_available(available: Bytes, page: Bytes) -> Self {
        let nothing = Bytes::ZERO;
        Place { total: available, overhead: nothing, foreign: nothing, canary: Some(nothing), page, is_host: false }
    }

    /// What is kept free of use.
    pub fn canary(&self) -> Bytes {
        self.canary.unwrap_or_else(|| default_canary(self.total))
    }

    /// What leases can be had of.
    pub fn available(&self) -> Bytes {
        let taken = self.overhead.saturating_add(self.foreign).saturating_add(self.canary());
        self.total.saturating_sub(taken)
    }
}

/// What a runtime keeps free of a device of so many bytes where nobody has said anything: 256 MiB, or a sixteenth.
pub fn default_canary(total: Bytes) -> Bytes {
    Bytes::mib(256).min(Bytes(total.0 / 16))
}

/// All that a start follows from.
#[derive(Clone, Copy)]
pub struct Question<'q> {
    /// The model, planned or loaded.
    pub model: &'q Model,
    /// What it would be computed with.
    pub target: Target,
    /// The largest inputs that may reach the device, lowered to the model's own already.
    pub envelope: &'q Envelope,
    /// What is said of the size of keys and values.
    pub kv: KvChoice,
    /// Where.
    pub place: Place,
    /// What other limits fall back to when the one they were raised for is lowered.
    pub unsaid: Unsaid,
}

/// Limits that nobody has said, as they are expected of a device: what is said of others raises them
/// ([`Limits::over`](crate::engine::Limits::over)). Those that were said, or of which nothing is known, have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unsaid {
    /// Tokens in a step, raised to the sequences.
    pub step_tokens: Option<usize>,
    /// Patches in a launch, raised to those of a picture.
    pub launch_patches: Option<usize>,
}

/// What a start will come to.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Whether it will be READY, if nobody takes memory meanwhile.
    pub fits: bool,
    /// Tokens of keys and values at READY; none if it does not fit.
    pub kv_tokens: usize,
    /// One line a claimant. Where it fits keys and values have the size that they settle on, else that of the probe, which
    /// is the least that a start can do with.
    pub plan: MemoryPlan,
    /// What of the device can be leased.
    pub available: Bytes,
    /// What no claimant has, the canary apart; nothing if it does not fit.
    pub free: Bytes,
    /// How much is missing, if it does not fit and the plan is larger than what is available. A plan that is not may still
    /// leave keys and values less than one sequence may have.
    pub short_by: Bytes,
    /// Each knob with the value that alone would make it fit; those that cannot have none. Nothing if it fits.
    pub suggestions: Vec<Suggestion>,
}

impl Forecast {
    /// Works it out. Where it does not fit that takes some hundred plans.
    ///
    /// # Errors
    /// A shape that does not go together.
    pub fn of(question: &Question<'_>) -> Result<Self, KernelError> {
        let needs = Needs::plan(question.model, question.target, question.envelope, question.place.page)?;
        let (mut plan, available) = (needs.memory_plan(), question.place.available());
        let settled = settle(&needs, question.envelope, &question.kv, &question.place);
        let fits = settled.is_ok();
        let (mut kv_tokens, mut free) = (0, Bytes::ZERO);
        if let Ok(blocks) = settled {
            kv_tokens = blocks * BLOCK_TOKENS;
            plan = needs.memory_plan_with(blocks);
            free = available.saturating_sub(plan.total());
        }
        let suggestions = if fits { Vec::new() } else { suggestion::of(question, &needs) };
        let short_by = if fits { Bytes::ZERO } else { plan.total().saturating_sub(available) };
        Ok(Forecast { fits, kv_tokens, plan, available, free, short_by, suggestions })
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

/// Why a start will not come to READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// More is wanted than there is, by so much.
    Short,
    /// Keys and values would hold less than one sequence may have.
    TooSmall,
}

/// The blocks of keys and values that a start settles on: the same arithmetic as an attempt's.
pub(super) fn settle(needs: &Needs, envelope: &Envelope, kv: &KvChoice, place: &Place) -> Result<usize, Unfit> {
    let (shape, page, available) = (needs.kv_shape, place.page, place.available());
    let claimed = needs.memory_plan().total();
    let left = available.checked_sub(claimed).ok_or(Unfit::Short)?;
    let probe = needs.probe();
    let beside = place.overhead.saturating_add(claimed).saturating_sub(probe);
    let room = KvRoom { total: place.total, beside, available: left, probe, is_host: place.is_host };
    let blocks = kv.sizing(&room, shape, page).blocks(shape, page);
    if blocks * BLOCK_TOKENS < envelope.context_tokens {
        return Err(Unfit::TooSmall);
    }
    let blocks = blocks.max(needs.probe_blocks);
    match KvMemory::bytes(shape, blocks, page) <= left + probe {
        true => Ok(blocks),
        false => Err(Unfit::Short),
    }
}
