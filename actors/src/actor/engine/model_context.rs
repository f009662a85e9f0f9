//! Read-only data of a model that its requests share.

use std::sync::{Arc, OnceLock};

use bursar_model::{
    Envelope,
    checkpoint::Checkpoint,
    error::GrammarError,
    flow::{CacheFormat, ImageLimits},
    processor::MediaProcessors,
    registry::FamilyConfig,
    sampling::{GenerationDefaults, GrammarCompiler},
    text::PromptEncoder,
};

use super::{EffectiveLimits, LoadOptions};
use crate::{knobs::SamplingDefaults, scheduler::DraftSource};

/// The host side of a model: everything that requests need in addition to the actors.
pub struct ModelContext {
    pub name: String,
    /// Sizes, placeholder tokens and position rules of the model's family.
    pub family: FamilyConfig,
    pub prompts: PromptEncoder,
    /// The processors that decode pictures and videos and resize them to the envelope. `None` for a
    /// model without pictures.
    pub processors: Option<Arc<MediaProcessors>>,
    /// Sampling defaults for requests that set no parameters.
    pub generation: GenerationDefaults,
    /// Data type of the KV cache.
    pub cache: CacheFormat,
    /// The limits for which the start was planned.
    pub envelope: Envelope,
    /// How tokens are drafted. `None` if no tokens are drafted.
    pub draft_source: Option<DraftSource>,
    /// Limits on a picture's file, checked before decoding.
    pub image_limits: ImageLimits,
    /// The compiler of grammars, created for the first reply that must match a schema, expression
    /// or choice.
    grammars: OnceLock<Result<GrammarCompiler, Arc<GrammarError>>>,
}

/// Returns the checkpoint's generation defaults, with the sampling defaults that `defaults`
/// selects. End tokens without logits are removed, because they can never be sampled.
fn generation(checkpoint: &Checkpoint, vocabulary: usize, defaults: SamplingDefaults) -> GenerationDefaults {
    let mut own = checkpoint.generation.clone();
    let had_ends = !own.eos_ids.is_empty();
    own.eos_ids.retain(|id| (*id as usize) < vocabulary);
    if had_ends && own.eos_ids.is_empty() {
        tracing::warn!(vocabulary, "no end token of the checkpoint has a logit: replies end only at `max_tokens`");
    }
    match defaults {
        SamplingDefaults::Transformers => own,
        SamplingDefaults::Vllm => GenerationDefaults { sampling: own.listed.clone(), ..own },
        SamplingDefaults::Ignored => GenerationDefaults { sampling: GenerationDefaults::default().listed, ..own },
    }
}

impl ModelContext {
    /// Combines a checkpoint's host side, including its `prompts`, with the limits for which the
    /// start was planned.
    pub fn new(
        name: String,
        checkpoint: &Checkpoint,
        family: FamilyConfig,
        options: &LoadOptions,
        inputs: &EffectiveLimits,
        prompts: PromptEncoder,
    ) -> Self {
        let EffectiveLimits { envelope, pictures, .. } = inputs.clone();
        let videos = family.video_processor(checkpoint);
        let step_text_tokens = family.step_text_tokens();
        let visual = pictures.map(|pictures| MediaProcessors { pictures, videos, step_text_tokens });
        ModelContext {
            name,
            prompts,
            processors: visual.map(Arc::new),
            generation: generation(checkpoint, family.decoder().vocabulary, options.sampling_defaults),
            cache: checkpoint.cache(),
            draft_source: (envelope.draft_tokens > 0).then_some(options.draft_source),
            envelope,
            image_limits: options.image_limits.clone(),
            grammars: OnceLock::new(),
            family,
        }
    }

    /// Returns the compiler of grammars for formatted replies. The first call is slow, because it
    /// reads the whole vocabulary.
    ///
    /// # Errors
    /// The vocabulary cannot be used for grammars.
    pub fn grammars(&self) -> Result<&GrammarCompiler, Arc<GrammarError>> {
        let compiler = self.grammars.get_or_init(|| {
            let vocabulary = self.family.decoder().vocabulary;
            GrammarCompiler::new(self.prompts.tokenizer(), vocabulary, &self.generation.eos_ids).map_err(Arc::new)
        });
        compiler.as_ref().map_err(Clone::clone)
    }
}
