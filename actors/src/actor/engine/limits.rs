//! The envelope that results from the limits set by the user. These limits override the device's
//! defaults and are lowered to the model's own limits.

use bursar_budgets::Bytes;
use bursar_model::{
    DRAFTS_OF_STEP, Envelope, LimitError, MergeSize, PATCHES_LEAST,
    error::CheckpointError,
    processor::{ImageProcessor, PixelBounds, Tiling},
    registry::FamilyConfig,
};

use super::StartError;
use crate::knobs::{Limits, LoadOptions, Names};

/// Default size of an encoder batch in patches, unless the device's default is smaller or pictures
/// may be larger: one picture of 896 x 896 pixels, in patches of 14 x 14 pixels. Smaller pictures
/// share a batch. A smaller batch gains nothing, because it does not fill a GPU.
const SHARED_LAUNCH_PATCHES: usize = 4096;

/// Bounds of a model's inputs before the user sets any limits.
#[derive(Clone, Copy)]
pub struct ModelBounds<'m> {
    /// The configuration of the model's family.
    pub family: &'m FamilyConfig,
    /// The processor that resizes the model's pictures. `None` for a model without pictures.
    pub pictures: Option<&'m ImageProcessor>,
    /// Whether host memory simulates a GPU.
    pub is_host: bool,
}

impl ModelBounds<'_> {
    /// The image processor, the pixels of a patch, and the merge size of patches. `None` for a
    /// model without pictures.
    fn patch(&self) -> Option<(&ImageProcessor, u64, MergeSize)> {
        let (pictures, merge) = (self.pictures?, self.family.merge()?);
        Some((pictures, u64::from(pictures.config().patch_size).pow(2), merge))
    }

    /// Pixels per token. `None` for a model without pictures.
    pub fn token_pixels(&self) -> Option<u64> {
        self.patch().map(|(_, pixels, merge)| pixels * merge.patches_per_token() as u64)
    }
}

#[derive(Clone, Debug)]
pub struct EffectiveLimits {
    pub envelope: Envelope,
    /// The processor that resizes pictures to the envelope. `None` for a model without pictures.
    pub pictures: Option<ImageProcessor>,
    /// Pixels of the largest picture that the model's own processor allows, if that is larger than
    /// the envelope and the user set no picture limit.
    pub own_pixels: Option<u64>,
}

impl LoadOptions {
    /// The envelope that results from the limits set by the user. These limits override the
    /// device's defaults and are lowered to the model's own limits. Starts, plans and suggestions
    /// all call this function for their envelope.
    ///
    /// # Errors
    /// [`StartError::Limit`] for limits that contradict each other or are too low for any
    /// request. The error names a limit as the user did. [`StartError::MemoryFraction`] for a
    /// fraction out of range.
    pub fn lowered(&self, own: &ModelBounds<'_>) -> Result<EffectiveLimits, StartError> {
        self.check_sizes().and_then(|()| self.lower(own)).map_err(|error| match error {
            StartError::Limit(error) => {
                let limit = self.names.of(&error.limit).map_or_else(|| error.limit.clone(), str::to_owned);
                StartError::Limit(LimitError { limit, ..error })
            }
            error => error,
        })
    }

    fn lower(&self, own: &ModelBounds<'_>) -> Result<EffectiveLimits, StartError> {
        let expected = self.envelope.clone().unwrap_or_else(|| Self::envelope_for(own.is_host));
        let limits = &self.limits;
        let sequences = limits.sequences.unwrap_or(expected.sequences);
        let steps = limits.sequences.map_or(expected.step_tokens, |sequences| expected.step_tokens.max(sequences));
        let mut envelope = Envelope {
            context_tokens: self.context_tokens_for(own.is_host).min(own.family.decoder().context_tokens),
            sequences,
            step_tokens: limits.step_tokens.unwrap_or(steps),
            draft_tokens: limits.draft_tokens.unwrap_or(expected.draft_tokens),
            pictures: limits.pictures.unwrap_or(expected.pictures),
            // If the user limited the number of pictures, that limit also applies to pictures of
            // the largest size.
            largest_pictures: limits.pictures.unwrap_or(expected.largest_pictures),
            video_frames: limits.video_frames.unwrap_or(expected.video_frames),
            ..expected
        };
        // A step must have space for one token per sequence, for one draft, and for one accepted
        // draft that runs again.
        let least = envelope.sequences + 2;
        if envelope.draft_tokens > 0 && own.family.decoder().step_format().has_states && envelope.step_tokens < least {
            let required = format!(
                "at least {least} (sequences + 2): a model with recurrent states runs accepted drafts again in the next \
                 step"
            );
            return Err(LimitError { limit: "step_tokens".to_owned(), value: envelope.step_tokens, required }.into());
        }
        let Some((processor, patch_pixels, merge)) = own.patch() else {
            envelope.picture_patches = envelope.picture_patches.min(envelope.launch_patches);
            envelope.check()?;
            return Ok(EffectiveLimits { envelope, pictures: None, own_pixels: None });
        };
        let of_pixels = |pixels: u64| usize::try_from(pixels / patch_pixels).unwrap_or(usize::MAX);
        let requested = limits.picture_pixels.map(of_pixels).or(limits.picture_patches);
        // The encoder batch of an envelope that the user set is used unchanged, unless the user
        // also limited encoder batches or pictures.
        let is_given = self.envelope.is_some();
        let launch = limits.launch_patches.or((is_given && requested.is_none()).then_some(envelope.launch_patches));
        let beside_text = if is_given { usize::MAX } else { envelope.patches_beside_text(merge) };
        // A default limit is at least one tile, if the model splits pictures into tiles.
        let tile = processor.config().tiling.map_or(0, |tiling| of_pixels(tiling.tile_pixels()));
        let default = envelope.picture_patches.min(beside_text);
        let default = if is_given { default } else { default.max(tile) };
        let picture = requested.unwrap_or(default).min(launch.unwrap_or(usize::MAX));
        let shared =
            if is_given { envelope.launch_patches } else { envelope.launch_patches.min(SHARED_LAUNCH_PATCHES) };
        let launch_of = |picture: usize| launch.unwrap_or(shared.max(picture));
        (envelope.picture_patches, envelope.launch_patches) = (picture, launch_of(picture));
        envelope.check().map_err(|error| match limits.picture_pixels {
            Some(pixels) if error.limit == "picture_patches" => in_pixels(error, pixels, patch_pixels),
            _ => error,
        })?;
        let pictures = limit_pictures(processor, limits, &self.names, picture)?;
        let (own_pixels, lowered) = (processor.config().pixel_bounds.max, pictures.config().pixel_bounds);
        let most = lowered.max;
        envelope.picture_patches = picture.min(lowered.reach().div_ceil(patch_pixels) as usize);
        envelope.launch_patches = launch_of(envelope.picture_patches);
        require_whole_pictures(&mut envelope, own.family, limits.step_tokens.is_some())?;
        let is_unset = !is_given && requested.is_none() && limits.launch_patches.is_none();
        Ok(EffectiveLimits {
            envelope,
            pictures: Some(pictures),
            own_pixels: Some(own_pixels).filter(|own| is_unset && *own > most),
        })
    }

    fn check_sizes(&self) -> Result<(), StartError> {
        if let Some(value) = self.kv_tokens.filter(|tokens| *tokens > KV_TOKENS_MOST) {
            let required = format!("at most {KV_TOKENS_MOST}");
            return Err(LimitError { limit: "kv_tokens".to_owned(), value, required }.into());
        }
        if let Some(bytes) = self.kv_bytes.filter(|bytes| *bytes > KV_BYTES_MOST) {
            let required = format!("at most {}", KV_BYTES_MOST.0);
            return Err(LimitError { limit: "kv_bytes".to_owned(), value: bytes.as_usize(), required }.into());
        }
        for (name, value) in [("memory_fraction", self.memory_fraction), ("device_fraction", self.device_fraction)] {
            match value {
                Some(value) if !(value > 0.0 && value <= 1.0) => {
                    return Err(StartError::MemoryFraction { name, value });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Raises `step_tokens` so that a step fits the largest picture, and one token and the drafts of
/// each sequence. Only for models in which tokens of a picture attend to later ones.
///
/// # Errors
/// [`LimitError`] if the user set a lower `step_tokens`.
fn require_whole_pictures(envelope: &mut Envelope, family: &FamilyConfig, is_set: bool) -> Result<(), LimitError> {
    let picture = family.whole_picture_tokens(envelope.picture_patches);
    if picture == 0 {
        return Ok(());
    }
    let least = envelope.sequences + picture;
    if !is_set {
        // Drafts get at most half of the other tokens (see `SchedulerCore::drafts_each`).
        let drafts = (envelope.draft_tokens * envelope.sequences).min(DRAFTS_OF_STEP);
        envelope.step_tokens = envelope.step_tokens.max(least + 2 * drafts);
    }
    if envelope.step_tokens >= least {
        return Ok(());
    }
    let required = format!(
        "at least {least} ({} sequences + {picture} tokens of a picture, which one step must contain)",
        envelope.sequences
    );
    Err(LimitError { limit: "step_tokens".to_owned(), value: envelope.step_tokens, required })
}

/// Maximum KV cache size in tokens that a user may set. No device has memory for this many tokens,
/// and up to this number no size in bytes overflows.
const KV_TOKENS_MOST: usize = 1 << 36;

/// Maximum KV cache size in bytes that a user may set: 1 PiB, which is more than any device has.
const KV_BYTES_MOST: Bytes = Bytes(1 << 50);

/// Converts the error to pixels, for a limit that was set in pixels.
fn in_pixels(error: LimitError, pixels: u64, patch_pixels: u64) -> LimitError {
    let required = if error.value < PATCHES_LEAST {
        format!("at least {}: a picture has at least one token", PATCHES_LEAST as u64 * patch_pixels)
    } else {
        error.required
    };
    LimitError { limit: "picture_pixels".to_owned(), value: usize::try_from(pixels).unwrap_or(usize::MAX), required }
}

/// The processor that resizes pictures to at most this many patches. Pixel limits that the user set
/// replace the limits of `processor`. For tiled pictures, the maximum can only be lowered.
fn limit_pictures(
    processor: &ImageProcessor,
    limits: &Limits,
    names: &Names,
    patches: usize,
) -> Result<ImageProcessor, StartError> {
    let mut config = processor.config().clone();
    let patch_pixels = u64::from(config.patch_size).pow(2);
    let own = config.pixel_bounds;
    // A pixel limit that is not a whole number of patches is used exactly, as in the reference
    // implementation.
    let requested = limits.picture_pixels.filter(|pixels| pixels / patch_pixels == patches as u64);
    let most = requested.unwrap_or(patches as u64 * patch_pixels);
    if let Some(tiling) = config.tiling {
        check_tiles(tiling, limits, most, patch_pixels)?;
    }
    if let Some(min) = limits.picture_pixels_min {
        let max = most.min(limits.picture_pixels.unwrap_or(own.max));
        if min > max {
            let by = match limits.picture_pixels {
                Some(requested) if requested == max => {
                    format!(" by {}", names.of("picture_pixels").unwrap_or("picture_pixels"))
                }
                _ => String::new(),
            };
            let (limit, value) = ("picture_pixels_min".to_owned(), usize::try_from(min).unwrap_or(usize::MAX));
            let required = format!("at most {max}: no picture has more{by}");
            return Err(LimitError { limit, value, required }.into());
        }
    }
    let min = limits.picture_pixels_min.unwrap_or(own.min);
    // If the model's own minimum exceeds the maximum, the call of `limited` below lowers the
    // minimum.
    let requested =
        limits.picture_pixels.map(|requested| if config.tiling.is_some() { requested.min(own.max) } else { requested });
    config.pixel_bounds = PixelBounds { min, max: requested.map_or(own.max, |requested| requested.max(min)) };
    let limited = ImageProcessor::new(config).and_then(|own| own.limited(most));
    Ok(limited.map_err(CheckpointError::from)?)
}

/// Fails for limits that a model with tiled pictures cannot satisfy.
fn check_tiles(tiling: Tiling, limits: &Limits, most: u64, patch_pixels: u64) -> Result<(), StartError> {
    let (least, side) = (tiling.tile_pixels(), tiling.side);
    let (limit, value, required) = match (limits.picture_pixels_min, limits.picture_pixels) {
        (Some(min), _) if min > 1 => {
            ("picture_pixels_min", min, "at most 1: this model's pictures are tiles of one size".to_owned())
        }
        _ if most >= least => return Ok(()),
        (_, Some(requested)) if requested < least => {
            ("picture_pixels", requested, format!("at least {least}: a picture has a tile of {side} x {side}"))
        }
        _ => {
            let (value, least) = (most / patch_pixels, least / patch_pixels);
            let limit = match limits.launch_patches {
                Some(launch) if launch as u64 == value => "launch_patches",
                _ => "picture_patches",
            };
            (limit, value, format!("at least {least}: a picture has a tile of {side} x {side}"))
        }
    };
    let value = usize::try_from(value).unwrap_or(usize::MAX);
    Err(LimitError { limit: limit.to_owned(), value, required }.into())
}

#[cfg(test)]
mod tests;
