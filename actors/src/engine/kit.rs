//! What a request needs to know of its model, apart from the actors: read-only and shared.

use std::sync::Arc;

use bursar_model::{
    Envelope,
    checkpoint::Checkpoint,
    flow::ImageLimits,
    processor::ImageProcessor,
    registry::FamilyConfig,
    sampling::GenerationDefaults,
    text::PromptEncoder,
};

use super::{LoadOptions, StartError};

/// A model's host side.
pub struct Kit {
    /// The model's name.
    pub name: String,
    /// Sizes, placeholders, positions.
    pub family: FamilyConfig,
    /// Text to tokens and back.
    pub prompts: PromptEncoder,
    /// Pictures to patches, within the envelope; none for a model that takes no pictures.
    pub processor: Option<Arc<ImageProcessor>>,
    /// What a request that says nothing gets.
    pub generation: GenerationDefaults,
    /// The limits that were planned for.
    pub envelope: Envelope,
    /// What a picture may be.
    pub image_limits: ImageLimits,
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
        let mut envelope = options.envelope.clone();
        envelope.context_tokens = envelope.context_tokens.min(family.decoder().context_tokens);
        check(&envelope, options.memory_fraction)?;
        let processor = match (&checkpoint.image_processor, family.merged_patches()) {
            (Some(processor), Some(_)) => Some(Arc::new(limit_pictures(processor, &mut envelope)?)),
            _ => None,
        };
        Ok(Kit {
            name,
            family,
            prompts: checkpoint.prompts.clone(),
            processor,
            generation: checkpoint.generation.clone(),
            envelope,
            image_limits: options.image_limits.clone(),
        })
    }
}

/// The processor that resizes to what the envelope lets through, and the envelope lowered to what it then makes.
fn limit_pictures(processor: &ImageProcessor, envelope: &mut Envelope) -> Result<ImageProcessor, StartError> {
    let patch_pixels = u64::from(processor.config().patch_size).pow(2);
    let patches = envelope.picture_patches.min(envelope.launch_patches);
    let limited = processor
        .limited(patches as u64 * patch_pixels)
        .map_err(|error| bursar_model::error::CheckpointError::from(error))?;
    let pixels = limited.config().pixel_bounds.max;
    envelope.picture_patches = patches.min(pixels.div_ceil(patch_pixels) as usize);
    Ok(limited)
}

fn check(envelope: &Envelope, memory_fraction: f64) -> Result<(), StartError> {
    let require = |holds: bool, limit, value: String, required: &str| match holds {
        true => Ok(()),
        false => Err(StartError::Limit { limit, value, required: required.to_owned() }),
    };
    let Envelope { context_tokens, sequences, step_tokens, picture_patches, pictures, launch_patches } = *envelope;
    require(context_tokens >= 2, "context_tokens", context_tokens.to_string(), "at least 2: one read, one written")?;
    require(sequences >= 1, "sequences", sequences.to_string(), "at least 1")?;
    let enough = format!("at least as many as sequences, {sequences}");
    require(step_tokens >= sequences, "step_tokens", step_tokens.to_string(), &enough)?;
    require(picture_patches >= 4, "picture_patches", picture_patches.to_string(), "at least 4: one token")?;
    require(pictures >= 1, "pictures", pictures.to_string(), "at least 1")?;
    let enough = format!("at least a picture's patches, {picture_patches}");
    require(launch_patches >= picture_patches, "launch_patches", launch_patches.to_string(), &enough)?;
    let is_share = memory_fraction > 0.0 && memory_fraction <= 1.0;
    require(is_share, "memory_fraction", memory_fraction.to_string(), "above 0 and at most 1")
}
