//! The image processor: sizes before pixels, then pixels.

use super::config::ImageProcessorConfig;
use super::patchify::{LevelValues, PatchShape, patchify};
use super::resample::{resize, resize_bytes};
use super::smart_resize::{PixelBounds, Size, smart_resize};
use crate::error::{ImageError, ProcessorError};
use crate::flow::patches::{Grid, Patches, PictureHash};
use crate::flow::rgb_image::RgbImage;

/// Turns decoded pictures into patches, as transformers' `Qwen2VLImageProcessor` does.
#[derive(Clone, Debug)]
pub struct ImageProcessor {
    config: ImageProcessorConfig,
    levels: LevelValues,
}

/// What a picture becomes, known from its size alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PicturePlan {
    /// The picture's size before.
    pub source: Size,
    /// Its size after resizing.
    pub resized: Size,
    /// Its patches along time, height and width.
    pub grid: Grid,
    /// All patches: what the vision encoder's permits count.
    pub patches: usize,
    /// Tokens it takes in the prompt.
    pub tokens: usize,
    /// f32 values of one patch.
    pub patch_values: usize,
    /// Host bytes that processing takes beside the decoded picture: between the passes, resized, patches.
    pub host_bytes: u64,
}

impl PicturePlan {
    /// Bytes of the patches themselves: what stays when processing is over.
    pub fn patches_bytes(&self) -> u64 {
        self.patches as u64 * self.patch_values as u64 * size_of::<f32>() as u64
    }
}

/// A picture ready for the encoder.
#[derive(Clone, Debug)]
pub struct ProcessedPicture {
    /// Its patches.
    pub patches: Patches,
    /// What it is cached by.
    pub hash: PictureHash,
}

impl ImageProcessor {
    /// # Errors
    /// [`ProcessorError::OutOfRange`] for settings that were built by hand and not by `from_json`.
    pub fn new(config: ImageProcessorConfig) -> Result<Self, ProcessorError> {
        config.check()?;
        Ok(ImageProcessor { levels: LevelValues::new(&config), config })
    }

    /// The settings it follows.
    pub fn config(&self) -> &ImageProcessorConfig {
        &self.config
    }

    /// The same processor with at most `pixels_max` a picture, where its own limit is not lower: an envelope's way to
    /// have pictures resized. Pictures thinner than a merge group may still exceed it, see [`smart_resize`].
    pub fn limited(&self, pixels_max: u64) -> Result<Self, ProcessorError> {
        let bounds = self.bounds_within(pixels_max);
        ImageProcessor::new(ImageProcessorConfig { pixel_bounds: bounds, ..self.config.clone() })
    }

    fn bounds_within(&self, pixels_max: u64) -> PixelBounds {
        let own = self.config.pixel_bounds;
        let max = own.max.min(pixels_max.max(u64::from(self.config.factor()).pow(2)));
        // Enlarging rounds up: towards a minimum close to the maximum it would overshoot that with ordinary pictures.
        let min = if own.min > max / 2 { max / 4 } else { own.min };
        PixelBounds { min, max }
    }

    /// Sizes, patches, tokens and host bytes of a picture of `width x height` pixels, in constant time.
    ///
    /// # Errors
    /// As [`smart_resize`]; [`ImageError::NotAMultiple`] when `do_resize` is off and the picture does not fit.
    pub fn plan(&self, width: u32, height: u32) -> Result<PicturePlan, ImageError> {
        self.plan_bounded(width, height, self.config.pixel_bounds)
    }

    /// The same with at most `pixels_max`, as of a processor that is [`limited`](Self::limited) to it.
    pub(super) fn plan_within(&self, width: u32, height: u32, pixels_max: u64) -> Result<PicturePlan, ImageError> {
        self.plan_bounded(width, height, self.bounds_within(pixels_max))
    }

    fn plan_bounded(&self, width: u32, height: u32, bounds: PixelBounds) -> Result<PicturePlan, ImageError> {
        let config = &self.config;
        let (source, factor) = (Size { width, height }, config.factor());
        let resized = if config.do_resize {
            smart_resize(source, factor, bounds)?
        } else if width == 0 || height == 0 {
            return Err(ImageError::Empty { width, height });
        } else if !width.is_multiple_of(factor) || !height.is_multiple_of(factor) {
            return Err(ImageError::NotAMultiple { width, height, multiple: factor });
        } else {
            source
        };
        let grid = Grid { t: 1, h: resized.height / config.patch_size, w: resized.width / config.patch_size };
        let patch_values = self.shape().values();
        let mut plan = PicturePlan {
            source,
            resized,
            grid,
            patches: grid.patches(),
            tokens: grid.tokens(config.merge_size),
            patch_values,
            host_bytes: 0,
        };
        plan.host_bytes = resize_bytes(source, resized).saturating_add(plan.patches_bytes());
        Ok(plan)
    }

    /// Resizes a picture to its plan: the u8 picture between decoding and normalising.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn resize(&self, picture: &RgbImage) -> Result<RgbImage, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(resize(picture, plan.resized, self.config.resample))
    }

    /// Resizes, normalises, cuts and hashes a picture.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn process(&self, picture: &RgbImage) -> Result<ProcessedPicture, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        let mut pixels = vec![0.0; plan.patches * plan.patch_values];
        let hash = self.process_into(picture, &mut pixels)?;
        Ok(ProcessedPicture { patches: Patches { pixels, grid: plan.grid }, hash })
    }

    /// The same into memory of the caller's: `[patches, patch_values]` of the picture's plan.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    ///
    /// # Panics
    /// When `pixels` has another length than the plan says: the caller's bug.
    pub fn process_into(&self, picture: &RgbImage, pixels: &mut [f32]) -> Result<PictureHash, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(self.cut(&[self.resize_to(picture, plan.resized)], plan.grid, pixels))
    }

    /// A frame in the size that its video is planned to have.
    pub(super) fn resize_to(&self, frame: &RgbImage, size: Size) -> RgbImage {
        resize(frame, size, self.config.resample)
    }

    /// Normalises, cuts and hashes a step of a video: up to `temporal_patch_size` frames, resized already, of which the
    /// last is repeated where there are fewer. A step of one frame is what that frame is as a picture.
    pub(super) fn process_step(&self, frames: &[RgbImage], plan: &PicturePlan) -> ProcessedPicture {
        let mut pixels = vec![0.0; plan.patches * plan.patch_values];
        let hash = self.cut(frames, plan.grid, &mut pixels);
        ProcessedPicture { patches: Patches { pixels, grid: plan.grid }, hash }
    }

    /// Normalises, cuts and hashes frames that are resized already. Hashing is one thread's work; the others cut
    /// meanwhile.
    fn cut(&self, frames: &[RgbImage], grid: Grid, pixels: &mut [f32]) -> PictureHash {
        let cut = || patchify(frames, grid, self.shape(), &self.levels, pixels);
        rayon::join(|| self.hash(frames, grid), cut).0
    }

    fn shape(&self) -> PatchShape {
        PatchShape {
            patch: self.config.patch_size as usize,
            temporal: self.config.temporal_patch_size as usize,
            merge: self.config.merge_size as usize,
        }
    }

    /// Over the bytes before normalising, as they are an eighth of the patches, and what turns them into patches. The
    /// grid says how long a frame is, so frames need no mark between them.
    fn hash(&self, resized: &[RgbImage], grid: Grid) -> PictureHash {
        let config = &self.config;
        let mut hasher = blake3::Hasher::new_derive_key("bursar 2026 picture hash v1");
        let sizes = [grid.t, grid.h, grid.w, config.patch_size, config.temporal_patch_size, config.merge_size];
        sizes.iter().for_each(|size| {
            hasher.update(&size.to_le_bytes());
        });
        config.image_mean.iter().chain(&config.image_std).chain([&config.rescale_factor]).for_each(|number| {
            hasher.update(&number.to_bits().to_le_bytes());
        });
        hasher.update(&[u8::from(config.do_rescale), u8::from(config.do_normalize)]);
        resized.iter().for_each(|frame| {
            hasher.update(frame.data());
        });
        PictureHash(*hasher.finalize().as_bytes())
    }
}
