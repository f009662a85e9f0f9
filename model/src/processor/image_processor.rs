//! The image processor: it plans sizes first, then processes pixels.

use bursar_budgets::Bytes;

use super::config::ImageProcessorConfig;
use super::error::ProcessorError;
use super::resample::{resize, resize_bytes};
use super::smart_resize::{PixelBounds, Size, smart_resize};
use crate::flow::ImageError;
use crate::flow::resized_image::{Grid, Levels, PictureHash, ResizedImage};
use crate::flow::rgb_image::RgbImage;

/// Resizes decoded pictures for the encoder, as transformers' `Qwen2VLImageProcessor` does.
#[derive(Clone, Debug)]
pub struct ImageProcessor {
    config: ImageProcessorConfig,
    levels: Levels,
}

/// Sizes of a processed picture, computed from its size alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PicturePlan {
    /// The picture's size before resizing.
    pub source: Size,
    /// Its size after resizing.
    pub resized: Size,
    /// Its patches along time, height and width.
    pub grid: Grid,
    /// Number of patches, which the vision encoder's permits count.
    pub patches: usize,
    /// Tokens that it takes in the prompt.
    pub tokens: usize,
    /// Host bytes that processing takes beside the decoded picture: the one between the passes, and the resized one.
    pub host_bytes: Bytes,
}

impl PicturePlan {
    /// Bytes of one resized frame, which is what remains of a still picture after processing.
    pub fn patches_bytes(&self) -> Bytes {
        self.resized.rgb_bytes()
    }
}

/// A picture ready for the encoder.
#[derive(Clone, Debug)]
pub struct ProcessedPicture {
    /// The resized pixels, with their grid.
    pub image: ResizedImage,
    /// The key that it is cached by.
    pub hash: PictureHash,
}

impl ImageProcessor {
    /// # Errors
    /// [`ProcessorError::OutOfRange`] for settings that were built by hand and not by `from_json`.
    pub fn new(config: ImageProcessorConfig) -> Result<Self, ProcessorError> {
        config.check()?;
        Ok(ImageProcessor { levels: config.levels(), config })
    }

    /// The settings it follows.
    pub fn config(&self) -> &ImageProcessorConfig {
        &self.config
    }

    /// The same processor with at most `pixels_max` pixels per picture, or its own limit if that is lower. An envelope
    /// limits pictures this way. Pictures thinner than a merge group may still exceed it; see [`smart_resize`].
    pub fn limited(&self, pixels_max: u64) -> Result<Self, ProcessorError> {
        let bounds = self.bounds_within(pixels_max);
        ImageProcessor::new(ImageProcessorConfig { pixel_bounds: bounds, ..self.config.clone() })
    }

    fn bounds_within(&self, pixels_max: u64) -> PixelBounds {
        self.config.pixel_bounds.within(pixels_max.max(u64::from(self.config.factor()).pow(2)))
    }

    /// Sizes, patches, tokens and host bytes of a picture of `width x height` pixels, in constant time.
    ///
    /// # Errors
    /// As [`smart_resize`]; [`ImageError::NotAMultiple`] if `do_resize` is off and a side is not a multiple of the
    /// factor.
    pub fn plan(&self, width: u32, height: u32) -> Result<PicturePlan, ImageError> {
        let bounds = self.config.pixel_bounds;
        self.plan_by(Size { width, height }, |size, factor| smart_resize(size, factor, bounds))
    }

    /// As [`plan`](Self::plan) of a processor that is [`limited`](Self::limited) to `pixels_max`.
    pub(super) fn plan_within(&self, width: u32, height: u32, pixels_max: u64) -> Result<PicturePlan, ImageError> {
        let bounds = self.bounds_within(pixels_max);
        self.plan_by(Size { width, height }, |size, factor| smart_resize(size, factor, bounds))
    }

    /// The plan of a picture of `source`, whose size after resizing `resize` says for a factor.
    pub(super) fn plan_by(
        &self,
        source: Size,
        resize: impl FnOnce(Size, u32) -> Result<Size, ImageError>,
    ) -> Result<PicturePlan, ImageError> {
        let (config, Size { width, height }) = (&self.config, source);
        let factor = config.factor();
        let resized = if config.do_resize {
            resize(source, factor)?
        } else if width == 0 || height == 0 {
            return Err(ImageError::Empty { width, height });
        } else if !width.is_multiple_of(factor) || !height.is_multiple_of(factor) {
            return Err(ImageError::NotAMultiple { width, height, multiple: factor });
        } else {
            source
        };
        let grid = Grid { t: 1, h: resized.height / config.patch_size, w: resized.width / config.patch_size };
        let (patches, tokens) = (grid.patches(), grid.tokens(config.merge()));
        Ok(PicturePlan { source, resized, grid, patches, tokens, host_bytes: resize_bytes(source, resized) })
    }

    /// Resizes a picture to its plan, as u8, not normalised.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn resize(&self, picture: &RgbImage) -> Result<RgbImage, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(resize(picture, plan.resized, self.config.resample))
    }

    /// Resizes and hashes a picture.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn process(&self, picture: &RgbImage) -> Result<ProcessedPicture, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(self.process_step(vec![self.resize_to(picture, plan.resized)], &plan))
    }

    /// Resizes a frame to the size of its video's plan.
    pub(super) fn resize_to(&self, frame: &RgbImage, size: Size) -> RgbImage {
        resize(frame, size, self.config.resample)
    }

    /// Hashes a picture, or a step of a video with up to `temporal_patch_size` frames, resized already. A step of one
    /// frame equals that frame as a picture.
    pub(super) fn process_step(&self, frames: Vec<RgbImage>, plan: &PicturePlan) -> ProcessedPicture {
        let hash = self.hash(&frames, plan.grid);
        ProcessedPicture { image: ResizedImage { frames: frames.into(), grid: plan.grid, levels: self.levels }, hash }
    }

    /// Hashes the resized bytes and the settings that turn them into patches. The grid gives the length of a frame, so
    /// frames need no separator.
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
