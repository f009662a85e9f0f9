//! A chat checked against the envelope and turned into tokens, before anything is decoded or queued.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
};

use bursar_model::{
    flow::{Grid, ImageBytes, LayoutError, PromptLayout},
    sampling::{Sampler, SamplingParams},
    text::{StopRules, TemplateInputs},
};

use super::{Chat, ChatError};
use crate::engine::Kit;

/// A chat that may be served.
#[derive(Clone)]
pub(super) struct Preparation {
    pub(super) prompt: PromptLayout,
    pub(super) pictures: Vec<ImageBytes>,
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
        let sampler = Arc::new(Sampler::new(sampling(chat, kit), kit.family.decoder().vocabulary)?);
        let stop = StopRules::new(kit.generation.eos_ids.iter().copied(), chat.stop.clone())?;
        let (messages, pictures) = chat.split();
        let grids = plan_pictures(kit, &pictures)?;
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
fn plan_pictures(kit: &Kit, pictures: &[ImageBytes]) -> Result<Vec<Grid>, ChatError> {
    let limit = kit.envelope.pictures;
    if pictures.len() > limit {
        return Err(ChatError::TooManyPictures { pictures: pictures.len(), limit });
    }
    if pictures.is_empty() {
        return Ok(Vec::new());
    }
    // Templates of text models fail at pictures with words that help nobody.
    let processor = kit.processor.as_ref().ok_or(LayoutError::TextOnly { pictures: pictures.len() })?;
    let plan = |(index, picture): (usize, &ImageBytes)| {
        let error = |source| ChatError::Picture { index, source: Arc::new(source) };
        let header = picture.probe(&kit.image_limits).map_err(error)?;
        let grid = processor.plan(header.width, header.height).map_err(error)?.grid;
        // A very thin picture comes out of the resizing larger than it was limited to.
        let (patches, limit) = (grid.patches(), kit.envelope.picture_patches);
        if patches > limit {
            return Err(ChatError::PictureTooLarge { index, patches, limit });
        }
        Ok(grid)
    };
    pictures.iter().enumerate().map(plan).collect()
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
