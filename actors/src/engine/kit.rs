//! What a request needs to know of its model, apart from the actors: read-only and shared.

use std::sync::{Arc, OnceLock};

use bursar_model::{
    Envelope, LimitError,
    checkpoint::Checkpoint,
    error::GrammarError,
    flow::ImageLimits,
    processor::{ImageProcessor, PixelBounds, VisualProcessors},
    registry::FamilyConfig,
    sampling::{GenerationDefaults, GrammarCompiler},
    text::PromptEncoder,
};

use super::{Limits, LoadOptions, StartError};

/// A model's host side.
pub struct Kit {
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

impl Kit {
    /// Joins a checkpoint's host side with the user's limits; the model's own limits lower them.
    ///
    /// # Errors
    /// [`StartError::Limit`] for limits that no request could live with.
    pub fn new(
        name: String,
        checkpoint: &Checkpoint,
        family: FamilyConfig,
        options: &LoadOptions,
    ) -> Result<Self, StartError> {
        let patch_pixels = checkpoint.image_processor.as_ref().map(patch_pixels);
        let expected = options.envelope.clone().unwrap_or_default();
        let mut envelope = options.limits.over(&expected, patch_pixels).with_pictures_that_fit_a_launch();
        envelope.context_tokens = envelope.context_tokens.min(family.decoder().context_tokens);
        check(&envelope, options)?;
        let processors = match (&checkpoint.image_processor, &checkpoint.video_processor, family.merged_patches()) {
            (Some(pictures), Some(videos), Some(_)) => {
                let pictures = limit_pictures(pictures, &options.limits, &mut envelope)?;
                Some(Arc::new(VisualProcessors { pictures, videos: videos.clone() }))
            }
            _ => None,
        };
        Ok(Kit {
            name,
            family,
            prompts: checkpoint.prompts.clone(),
            processors,
            generation: checkpoint.generation.clone(),
            envelope,
            image_limits: options.image_limits.clone(),
            grammars: OnceLock::new(),
        })
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

fn patch_pixels(processor: &ImageProcessor) -> u64 {
    u64::from(processor.config().patch_size).pow(2)
}

/// The processor that resizes to what the envelope lets through, and the envelope lowered to what it then makes. What a
/// user has said of pixels is instead of the processor's own.
fn limit_pictures(
    processor: &ImageProcessor,
    limits: &Limits,
    envelope: &mut Envelope,
) -> Result<ImageProcessor, StartError> {
    let patch_pixels = patch_pixels(processor);
    let patches = envelope.picture_patches.min(envelope.launch_patches);
    let mut config = processor.config().clone();
    let PixelBounds { min, max } = config.pixel_bounds;
    let min = limits.picture_pixels_min.unwrap_or(min);
    config.pixel_bounds =
        PixelBounds { min, max: limits.picture_pixels.map_or(max, |said| own_max(said, min, limits)) };
    // Pixels that are not whole patches are kept to, as the reference keeps to them.
    let said = limits.picture_pixels.filter(|pixels| pixels / patch_pixels == patches as u64);
    let limited =
        ImageProcessor::new(config).and_then(|own| own.limited(said.unwrap_or(patches as u64 * patch_pixels)));
    let limited = limited.map_err(bursar_model::error::CheckpointError::from)?;
    let pixels = limited.config().pixel_bounds.max;
    envelope.picture_patches = patches.min(pixels.div_ceil(patch_pixels) as usize);
    Ok(limited)
}

/// The largest size said, which lowers a smallest one that nobody said; that is done where a processor is limited.
fn own_max(said: u64, min: u64, limits: &Limits) -> u64 {
    if limits.picture_pixels_min.is_some() { said } else { said.max(min) }
}

/// More than any device holds; below it no size in bytes overflows.
const KV_TOKENS_MOST: usize = 1 << 36;

fn check(envelope: &Envelope, options: &LoadOptions) -> Result<(), StartError> {
    envelope.check()?;
    if let Some(value) = options.kv_tokens.filter(|tokens| *tokens > KV_TOKENS_MOST) {
        return Err(LimitError { limit: "kv_tokens", value, required: format!("at most {KV_TOKENS_MOST}") }.into());
    }
    for (name, value) in [("memory_fraction", options.memory_fraction), ("device_fraction", options.device_fraction)] {
        match value {
            Some(value) if !(value > 0.0 && value <= 1.0) => return Err(StartError::MemoryFraction { name, value }),
            _ => {}
        }
    }
    Ok(())
}
