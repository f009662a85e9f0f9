//! What a request needs to know of its model besides its actors: read-only and shared.

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
use crate::knobs::SamplingDefaults;

/// The host side of a model.
pub struct ModelContext {
    /// The model's name.
    pub name: String,
    /// Sizes, placeholder tokens and position rules of the model's family.
    pub family: FamilyConfig,
    /// The template and tokenizer.
    pub prompts: PromptEncoder,
    /// Decodes and resizes pictures and videos within the envelope. None for a model without pictures.
    pub processors: Option<Arc<MediaProcessors>>,
    /// Sampling defaults for requests that set none.
    pub generation: GenerationDefaults,
    /// How keys and values are kept.
    pub cache: CacheFormat,
    /// The limits that were planned for.
    pub envelope: Envelope,
    /// Limits on a picture's file, checked before decoding.
    pub image_limits: ImageLimits,
    /// Compiled when the first reply needs a form.
    grammars: OnceLock<Result<GrammarCompiler, Arc<GrammarError>>>,
}

/// The checkpoint's defaults, with the sampling that these options choose. End tokens without logits never come.
fn generation(checkpoint: &Checkpoint, vocabulary: usize, defaults: SamplingDefaults) -> GenerationDefaults {
    let mut own = checkpoint.generation.clone();
    own.eos_ids.retain(|id| (*id as usize) < vocabulary);
    match defaults {
        SamplingDefaults::Transformers => own,
        SamplingDefaults::Vllm => GenerationDefaults { sampling: own.listed.clone(), ..own },
        SamplingDefaults::Ignored => GenerationDefaults { sampling: GenerationDefaults::default().listed, ..own },
    }
}

impl ModelContext {
    /// Joins a checkpoint's host side, including its `prompts`, with the envelope that was planned for.
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
            envelope,
            image_limits: options.image_limits.clone(),
            grammars: OnceLock::new(),
            family,
        }
    }

    /// The compiler of grammars for formatted replies. The first call is slow, because it reads the whole vocabulary.
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
