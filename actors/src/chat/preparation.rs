//! A chat checked against the envelope and turned into tokens, before anything is decoded or queued.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
};

use bursar_model::{
    flow::{LayoutError, PromptLayout, Visual, VisualGrid},
    processor::{VisualLimits, VisualPlan},
    sampling::{Sampler, SamplingParams},
    text::{StopRules, TemplateInputs},
};

use super::{Chat, ChatError};
use crate::engine::Kit;

/// A chat that may be served.
#[derive(Clone)]
pub(super) struct Preparation {
    pub(super) prompt: PromptLayout,
    pub(super) pictures: Vec<VisualPlan>,
    pub(super) tokens_max: usize,
    pub(super) stop: StopRules,
    pub(super) stop_tokens: Arc<[u32]>,
    pub(super) sampler: Arc<Sampler>,
}

impl Preparation {
    /// # Errors
    /// Whatever is outside the envelope, with the limit, the value and a hint.
    pub(super) fn of(chat: &Chat, kit: &Kit, kv_tokens: usize) -> Result<Self, ChatError> {
        if chat.is_empty() {
            return Err(ChatError::Empty);
        }
        if chat.max_tokens == Some(0) {
            return Err(ChatError::NoTokens);
        }
        let sampler = Arc::new(Sampler::new(sampling(chat, kit))?);
        let stop = StopRules::new(kit.generation.eos_ids.iter().copied(), chat.stop.clone())?;
        let (messages, visuals) = chat.split();
        let pictures = plan_pictures(kit, &visuals)?;
        let grids: Vec<VisualGrid> = pictures.iter().map(VisualPlan::grid).collect();
        let inputs = TemplateInputs { add_generation_prompt: true, ..TemplateInputs::default() };
        let tokens = kit.prompts.encode(&messages, &inputs)?;
        let prompt = kit.family.lay_out(tokens, &grids)?;
        let limit = kit.envelope.context_tokens.min(kv_tokens);
        let count = prompt.tokens.len();
        if count == 0 || count >= limit {
            return Err(ChatError::TooLong { tokens: count, limit });
        }
        let tokens_max = chat.max_tokens.unwrap_or(usize::MAX).min(limit - count);
        Ok(Preparation { prompt, pictures, tokens_max, stop_tokens: stop.ids().collect(), stop, sampler })
    }
}

/// Sizes from headers alone; the same cost function that the profile's envelope was made with.
fn plan_pictures(kit: &Kit, visuals: &[Visual]) -> Result<Vec<VisualPlan>, ChatError> {
    if visuals.is_empty() {
        return Ok(Vec::new());
    }
    // Templates of text models fail at pictures with words that help nobody.
    let processors = kit.processors.as_ref().ok_or(LayoutError::TextOnly { pictures: visuals.len() })?;
    Ok(processors.plan(visuals, VisualLimits { envelope: &kit.envelope, image: &kit.image_limits })?)
}

/// A seed that nobody chose: the standard library's own source of randomness, that of its hash maps.
fn any_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn sampling(chat: &Chat, kit: &Kit) -> SamplingParams {
    let defaults = kit.generation.sampling.clone();
    SamplingParams {
        temperature: chat.temperature.unwrap_or(defaults.temperature),
        top_p: chat.top_p.unwrap_or(defaults.top_p),
        top_k: chat.top_k.unwrap_or(defaults.top_k),
        seed: chat.seed.unwrap_or_else(any_seed),
        ..defaults
    }
}
