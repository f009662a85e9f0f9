//! What a request needs to know of its model, apart from the actors: read-only and shared.

use std::sync::{Arc, OnceLock};

use bursar_model::{
    Envelope,
    checkpoint::Checkpoint,
    error::GrammarError,
    flow::ImageLimits,
    processor::VisualProcessors,
    registry::FamilyConfig,
    sampling::{GenerationDefaults, GrammarCompiler},
    text::PromptEncoder,
};

use super::{LoadOptions, Lowered};

/// A model's host side.
pub struct ModelContext {
    /// The model's name.
    pub name: String,
    /// Sizes, placeholders, positions.
    pub family: FamilyConfig,
    /// Text to tokens and back.
    pub prompts: PromptEncoder,
    /// Pictures and videos to patches, within the envelope; none for a model that takes no pictures.
    pub processors: Option<Arc<VisualProcessors>>,
    /// What a request that says nothing gets.
    pub generation: GenerationDefaults,
    /// The limits that were planned for.
    pub envelope: Envelope,
    /// What a picture may be.
    pub image_limits: ImageLimits,
    /// Made when the first reply is to have a form.
    grammars: OnceLock<Result<GrammarCompiler, Arc<GrammarError>>>,
}

impl ModelContext {
    /// Joins a checkpoint's host side, its `prompts` among it, with the largest inputs that are planned for.
    pub fn new(
        name: String,
        checkpoint: &Checkpoint,
        family: FamilyConfig,
        options: &LoadOptions,
        inputs: &Lowered,
        prompts: PromptEncoder,
    ) -> Self {
        let Lowered { envelope, pictures, .. } = inputs.clone();
        let videos = checkpoint.video_processor.clone();
        let visual = pictures.zip(videos).map(|(pictures, videos)| VisualProcessors { pictures, videos });
        ModelContext {
            name,
            family,
            prompts,
            processors: visual.map(Arc::new),
            generation: checkpoint.generation.clone(),
            envelope,
            image_limits: options.image_limits.clone(),
            grammars: OnceLock::new(),
        }
    }

    /// Makes grammars of the forms that replies are to have. The first call takes a moment, as it goes through the
    /// whole vocabulary.
    ///
    /// # Errors
    /// The vocabulary cannot be followed.
    pub fn grammars(&self) -> Result<&GrammarCompiler, Arc<GrammarError>> {
        let compiler = self.grammars.get_or_init(|| {
            let vocabulary = self.family.decoder().vocabulary;
            GrammarCompiler::new(self.prompts.tokenizer(), vocabulary, &self.generation.eos_ids).map_err(Arc::new)
        });
        compiler.as_ref().map_err(Clone::clone)
    }
}
