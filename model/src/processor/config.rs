//! Settings of the image processor (`preprocessor_config.json`) and of the video processor, whose
//! settings have the same form.

use serde::Deserialize;

use super::error::ProcessorError;
use super::resample::Resample;
use super::smart_resize::{PixelBounds, Sizing};
use super::tiling::{CropRule, TileCut, Tiling};
use crate::{MergeSize, flow::Levels};

/// Values of `image_processor_type` whose arithmetic is implemented here.
const KNOWN_PROCESSORS: [&str; 5] = [
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLImageProcessor",
    "Qwen2_5_VLImageProcessorFast",
];

/// Values of `image_processor_type` that cut pictures into tiles.
const TILING_PROCESSORS: [&str; 3] = ["GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil"];

/// Values of `image_processor_type` that resize every picture to one size, and may add crops.
const CROPPING_PROCESSORS: [&str; 3] = ["Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"];

/// Values of `image_processor_type` that resize every picture to the largest size within a number of
/// tokens.
const TOKEN_LIMIT_PROCESSORS: [&str; 4] =
    ["Gemma4ImageProcessor", "Gemma4ImageProcessorFast", "Gemma4ImageProcessorPil", UNIFIED_PROCESSORS[0]];

/// The image and video processors of Gemma 4 12B. They merge patches, so each patch is a token.
pub(super) const UNIFIED_PROCESSORS: [&str; 2] = ["Gemma4UnifiedImageProcessor", "Gemma4UnifiedVideoProcessor"];

/// Processor types that cut pictures into tiles only if `config.json` says so.
const MAYBE_TILING_PROCESSORS: [&str; 2] = ["CLIPFeatureExtractor", "CLIPImageProcessor"];

/// Tile settings that checkpoints older than transformers' own InternVL processor keep in
/// `config.json`, each with the name used here.
pub(crate) const TILING_KEYS: [(&str, &str); 5] = [
    ("dynamic_image_size", "dynamic_image_size"),
    ("min_dynamic_patch", "min_patches"),
    ("max_dynamic_patch", "max_patches"),
    ("use_thumbnail", "use_thumbnail"),
    ("pad2square", "pad2square"),
];

/// The video processor that makes one tile of each frame.
const TILING_VIDEO_PROCESSOR: &str = "InternVLVideoProcessor";

/// Video processors that resize frames like `TOKEN_LIMIT_PROCESSORS`.
const TOKEN_LIMIT_VIDEO_PROCESSORS: [&str; 2] = ["Gemma4VideoProcessor", UNIFIED_PROCESSORS[1]];

/// Values of `video_processor_type` whose arithmetic for a frame is that of `KNOWN_PROCESSORS`.
const KNOWN_VIDEO_PROCESSORS: [&str; 2] = ["Qwen2VLVideoProcessor", WHOLE_VIDEO_PROCESSOR];

/// The video processor whose pixel limits apply to all frames together.
const WHOLE_VIDEO_PROCESSOR: &str = "Qwen3VLVideoProcessor";

/// The most tiles of a picture, without the thumbnail.
const TILES_MAX: u32 = 64;

// CLIP's means and standard deviations, which transformers assumes if the file has none.
const CLIP_MEAN: [f64; 3] = [0.48145466, 0.4578275, 0.40821073];
const CLIP_STD: [f64; 3] = [0.26862954, 0.26130258, 0.27577711];

/// Whether the pixel bounds apply to a picture or to a whole video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedPixels {
    /// Pixels of each picture, or of each frame.
    Picture,
    /// Pixels of all frames of a video together.
    Video {
        /// Maximum tokens per frame, if the settings limit them (`cap_pixels_per_frame`).
        tokens_max: Option<u64>,
    },
}

/// Checked settings of an image processor.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessorConfig {
    /// Bounds on the pixels of a resized picture.
    pub pixel_bounds: PixelBounds,
    /// How a size within the bounds is chosen.
    pub sizing: Sizing,
    /// The tiling of pictures. `None` if pictures are not cut into tiles. With tiling, the pixel
    /// bounds limit the number of tiles.
    pub tiling: Option<Tiling>,
    /// Whether the pixel bounds apply to a picture or to a whole video.
    pub counted: CountedPixels,
    /// Pixels along a side of a patch.
    pub patch_size: u32,
    /// Frames that one patch covers.
    pub temporal_patch_size: u32,
    /// Patches along a side of a merge group.
    pub merge_size: u32,
    /// Mean of each channel, on a scale from 0 to 1.
    pub image_mean: [f64; 3],
    /// Standard deviation of each channel, on a scale from 0 to 1.
    pub image_std: [f64; 3],
    pub resample: Resample,
    /// Factor that each 8-bit channel value is multiplied by if `do_rescale` is set.
    pub rescale_factor: f64,
    /// Whether pictures are resized. If not, their sides must be multiples of
    /// [`factor`](Self::factor).
    pub do_resize: bool,
    /// Whether levels are multiplied by `rescale_factor`.
    pub do_rescale: bool,
    /// Whether the mean and the standard deviation are applied.
    pub do_normalize: bool,
}

/// Defaults of transformers' `Qwen2VLImageProcessor`.
impl Default for ImageProcessorConfig {
    fn default() -> Self {
        ImageProcessorConfig {
            pixel_bounds: PixelBounds { min: 56 * 56, max: 28 * 28 * 1280 },
            sizing: Sizing::Nearest,
            tiling: None,
            counted: CountedPixels::Picture,
            patch_size: 14,
            temporal_patch_size: 2,
            merge_size: 2,
            image_mean: CLIP_MEAN,
            image_std: CLIP_STD,
            resample: Resample::Bicubic,
            rescale_factor: 1.0 / 255.0,
            do_resize: true,
            do_rescale: true,
            do_normalize: true,
        }
    }
}

#[derive(Deserialize)]
pub(super) struct RawConfig {
    pub(super) video_processor_type: Option<String>,
    pub(super) image_processor_type: Option<String>,
    feature_extractor_type: Option<String>,
    pub(super) min_pixels: Option<u64>,
    pub(super) max_pixels: Option<u64>,
    pub(super) size: Option<Sides>,
    min_patches: Option<u32>,
    max_patches: Option<u32>,
    use_thumbnail: Option<bool>,
    dynamic_image_size: Option<bool>,
    pad2square: Option<bool>,
    do_center_crop: Option<bool>,
    pub(super) patch_size: Option<u32>,
    temporal_patch_size: Option<u32>,
    pub(super) merge_size: Option<u32>,
    image_mean: Option<Vec<f64>>,
    image_std: Option<Vec<f64>>,
    do_pan_and_scan: Option<bool>,
    pan_and_scan_min_crop_size: Option<u32>,
    pan_and_scan_max_num_crops: Option<u32>,
    pan_and_scan_min_ratio_to_activate: Option<f64>,
    resample: Option<i64>,
    rescale_factor: Option<f64>,
    do_resize: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    cap_pixels_per_frame: Option<bool>,
    max_video_tokens: Option<u64>,
    pub(super) max_soft_tokens: Option<u64>,
    pub(super) pooling_kernel_size: Option<u32>,
}

/// `size`: either the side of a square or an object.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Sides {
    Square(u32),
    Named(RawSize),
}

#[derive(Deserialize)]
pub(super) struct RawSize {
    height: Option<u32>,
    width: Option<u32>,
    shortest_edge: Option<u64>,
    longest_edge: Option<u64>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
}

impl ImageProcessorConfig {
    /// Parses and checks the file. `min_pixels` and `max_pixels` override `size`, as in
    /// transformers. Missing settings take the defaults of `Qwen2VLImageProcessor`, of
    /// `GotOcr2ImageProcessor` if pictures are cut into tiles, or of `Gemma3ImageProcessor` or
    /// `Gemma4ImageProcessor` if that is the type.
    ///
    /// # Errors
    /// Each variant of [`ProcessorError`].
    pub fn from_json(json: &[u8]) -> Result<Self, ProcessorError> {
        let raw = RawConfig::parse(json)?;
        if raw.cuts_tiles() {
            return raw.tiled();
        }
        if raw.adds_crops() {
            return raw.cropped();
        }
        if raw.is_one_of(&TOKEN_LIMIT_PROCESSORS) {
            return raw.token_limited(280);
        }
        raw.check_type()?;
        raw.over(ImageProcessorConfig::default())
    }

    /// Parses the settings of a video processor. They are in the part `video_processor` of
    /// `processor_config.json`, or else in `video_preprocessor_config.json`, or else in
    /// `preprocessor_config.json`, as in transformers. Missing settings take the defaults of
    /// `Qwen2VLVideoProcessor`, whose frames are smaller than pictures, of `Qwen3VLVideoProcessor`,
    /// or, for a processor of tiles, of the matching image processor with one tile per frame.
    ///
    /// # Errors
    /// Each variant of [`ProcessorError`].
    pub fn from_video_json(json: &[u8]) -> Result<Self, ProcessorError> {
        let raw = RawConfig::parse(json)?;
        if raw.cuts_tiles() {
            return Ok(raw.tiled()?.of_one_tile());
        }
        if raw.adds_crops() {
            return Ok(raw.cropped()?.of_one_tile());
        }
        let own = raw.video_processor_type.as_deref();
        let is_token_limited = own.is_some_and(|own| TOKEN_LIMIT_VIDEO_PROCESSORS.contains(&own));
        if is_token_limited || raw.video_processor_type.is_none() && raw.is_one_of(&TOKEN_LIMIT_PROCESSORS) {
            return raw.token_limited(70);
        }
        match &raw.video_processor_type {
            Some(found) if !KNOWN_VIDEO_PROCESSORS.contains(&found.as_str()) => {
                let known = [&KNOWN_VIDEO_PROCESSORS[..], &[TILING_VIDEO_PROCESSOR]].concat().join(", ");
                return Err(ProcessorError::UnknownProcessor { found: found.clone(), known });
            }
            Some(_) => {}
            None => raw.check_type()?,
        }
        raw.check_video_bounds()?;
        let group = if raw.counts_whole_videos() { 32 * 32 } else { 28 * 28 };
        let pixel_bounds = PixelBounds { min: group * 128, max: group * 768 };
        let default = ImageProcessorConfig { pixel_bounds, ..ImageProcessorConfig::default() };
        if !raw.counts_whole_videos() {
            return raw.over(default);
        }
        // Older settings files have no limit per frame, and then transformers 5.17 applies no
        // limit.
        let tokens_max = (raw.cap_pixels_per_frame == Some(true)).then(|| raw.max_video_tokens.unwrap_or(768));
        let counted = CountedPixels::Video { tokens_max };
        raw.over(ImageProcessorConfig { counted, patch_size: 16, image_mean: [0.5; 3], image_std: [0.5; 3], ..default })
    }
}

impl RawConfig {
    fn parse(json: &[u8]) -> Result<Self, ProcessorError> {
        serde_json::from_slice(json)
            .map_err(|error| ProcessorError::Malformed { line: error.line(), column: error.column() })
    }

    fn counts_whole_videos(&self) -> bool {
        self.video_processor_type.as_deref() == Some(WHOLE_VIDEO_PROCESSOR)
    }

    /// Refuses settings that the processors of transformers 5.17 ignore, and settings whose effect
    /// is not implemented here.
    fn check_video_bounds(&self) -> Result<(), ProcessorError> {
        if !self.counts_whole_videos() {
            let range = "false or null for this processor, as a limit on a whole video is not supported";
            return require("cap_pixels_per_frame", true, self.cap_pixels_per_frame != Some(true), range);
        }
        for (setting, pixels) in [("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)] {
            require(setting, pixels.unwrap_or(0), pixels.is_none(), "null for this processor (set `size` instead)")?;
        }
        Ok(())
    }

    /// Bounds on the pixels. Refuses a `size` that does not bound the pixels, for example a height
    /// and a width. The defaults of the transformers class cannot replace such a `size`, because
    /// they belong to another model.
    fn bounds(&self, default: PixelBounds) -> Result<PixelBounds, ProcessorError> {
        let size = match &self.size {
            Some(Sides::Named(size)) => Some(size),
            Some(Sides::Square(_)) | None => None,
        };
        let min = self.min_pixels.or(size.and_then(|size| size.shortest_edge.or(size.min_pixels)));
        let max = self.max_pixels.or(size.and_then(|size| size.longest_edge.or(size.max_pixels)));
        let both = min.zip(max);
        require(
            "size",
            format!("without {} bound", if min.is_none() { "a lower" } else { "an upper" }),
            self.size.is_none() || both.is_some(),
            "shortest_edge and longest_edge, in pixels of a whole picture",
        )?;
        Ok(PixelBounds { min: min.unwrap_or(default.min), max: max.unwrap_or(default.max) })
    }

    /// Applies the file's settings on top of `default`.
    pub(super) fn over(self, default: ImageProcessorConfig) -> Result<ImageProcessorConfig, ProcessorError> {
        let raw = self;
        let config = ImageProcessorConfig {
            pixel_bounds: raw.bounds(default.pixel_bounds)?,
            sizing: default.sizing,
            tiling: default.tiling,
            counted: default.counted,
            patch_size: raw.patch_size.unwrap_or(default.patch_size),
            temporal_patch_size: raw.temporal_patch_size.unwrap_or(default.temporal_patch_size),
            merge_size: raw.merge_size.unwrap_or(default.merge_size),
            image_mean: channels("image_mean", raw.image_mean, default.image_mean)?,
            image_std: channels("image_std", raw.image_std, default.image_std)?,
            resample: match raw.resample {
                None => default.resample,
                Some(3) => Resample::Bicubic,
                Some(2) => Resample::Bilinear,
                Some(resample) => return Err(ProcessorError::UnknownResample { resample }),
            },
            rescale_factor: raw.rescale_factor.unwrap_or(default.rescale_factor),
            do_resize: raw.do_resize.unwrap_or(default.do_resize),
            do_rescale: raw.do_rescale.unwrap_or(default.do_rescale),
            do_normalize: raw.do_normalize.unwrap_or(default.do_normalize),
        };
        config.check()?;
        Ok(config)
    }
}

impl ImageProcessorConfig {
    /// The normalization of levels, from `do_rescale`, `rescale_factor`,
    /// `do_normalize`, `image_mean` and `image_std`.
    ///
    /// transformers fuses rescaling into the mean and the deviation
    /// (`_fuse_mean_std_and_rescale_factor`, 5.17): `(level - mean / factor) / (std / factor)` in
    /// f32.
    pub fn levels(&self) -> Levels {
        if !self.do_normalize {
            let factor = if self.do_rescale { self.rescale_factor as f32 } else { 1.0 };
            return Levels { factor, ..Levels::PLAIN };
        }
        let fused = if self.do_rescale { (1.0 / self.rescale_factor) as f32 } else { 1.0 };
        let wide = |numbers: [f64; 3]| numbers.map(|number| number as f32 * fused);
        Levels { factor: 1.0, shift: wide(self.image_mean), scale: wide(self.image_std) }
    }

    /// Every setting as text, by its name in the file, so that a report can say which settings
    /// changed.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let ImageProcessorConfig {
            pixel_bounds: PixelBounds { min, max },
            sizing,
            tiling,
            counted,
            patch_size,
            temporal_patch_size,
            merge_size,
            image_mean,
            image_std,
            resample,
            rescale_factor,
            do_resize,
            do_rescale,
            do_normalize,
        } = self;
        vec![
            ("min_pixels", min.to_string()),
            ("max_pixels", max.to_string()),
            ("sizing", format!("{sizing:?}").to_lowercase()),
            ("tiling", format!("{tiling:?}")),
            ("counted_pixels", format!("{counted:?}")),
            ("patch_size", patch_size.to_string()),
            ("temporal_patch_size", temporal_patch_size.to_string()),
            ("merge_size", merge_size.to_string()),
            ("image_mean", format!("{image_mean:?}")),
            ("image_std", format!("{image_std:?}")),
            ("resample", format!("{resample:?}").to_lowercase()),
            ("rescale_factor", rescale_factor.to_string()),
            ("do_resize", do_resize.to_string()),
            ("do_rescale", do_rescale.to_string()),
            ("do_normalize", do_normalize.to_string()),
        ]
    }

    /// The same settings with one tile per picture, as used for video frames.
    fn of_one_tile(self) -> Self {
        let tiling = self.tiling.map(|tiling| Tiling { least: 1, most: 1, has_thumbnail: false, ..tiling });
        let max = tiling.map_or(self.pixel_bounds.max, Tiling::pixels_max);
        ImageProcessorConfig { tiling, pixel_bounds: PixelBounds { max, ..self.pixel_bounds }, ..self }
    }

    /// Pixels along a side of a merge group. Every resized side is a multiple of this number.
    pub fn factor(&self) -> u32 {
        self.patch_size * self.merge_size
    }

    /// Maximum tokens along a side of a picture, if the processor limits the number of tokens: a
    /// picture may consist of one row. The limit also applies if a picture's own `max_pixels` allows
    /// more tokens.
    pub fn side_tokens_max(&self) -> Option<u64> {
        let tokens = self.pixel_bounds.max / u64::from(self.factor()).pow(2);
        Some(tokens).filter(|_| self.sizing == Sizing::Largest)
    }

    /// How patches merge into tokens.
    pub fn merge(&self) -> MergeSize {
        MergeSize::new(self.merge_size as usize)
    }

    /// Checks that each setting is in its range.
    ///
    /// # Errors
    /// [`ProcessorError::OutOfRange`].
    pub fn check(&self) -> Result<(), ProcessorError> {
        let PixelBounds { min, max } = self.pixel_bounds;
        // These limits are far above any model's settings. They keep products of settings from
        // overflowing.
        require("patch_size", self.patch_size, (1..=256).contains(&self.patch_size), "from 1 to 256")?;
        let temporal = self.temporal_patch_size;
        require("temporal_patch_size", temporal, (1..=64).contains(&temporal), "from 1 to 64")?;
        require("merge_size", self.merge_size, (1..=64).contains(&self.merge_size), "from 1 to 64")?;
        if let Some(Tiling { side, least, most, has_thumbnail, cut }) = self.tiling {
            let is_whole = (1..=4096).contains(&side) && side.is_multiple_of(self.factor());
            require("size", side, is_whole, "a multiple of merged patches, up to 4096")?;
            require("max_patches", most, (1..=TILES_MAX).contains(&most), "from 1 to 64")?;
            require("min_patches", least, (1..=most).contains(&least), "at least 1 and at most max_patches")?;
            require("do_resize", self.do_resize, self.do_resize, "true, as tiles have one size")?;
            if let TileCut::Crops(CropRule { side_min, ratio_min }) = cut {
                require("pan_and_scan_min_crop_size", side_min, side_min > 0, "above 0")?;
                let ratio = "pan_and_scan_min_ratio_to_activate";
                require(ratio, ratio_min, ratio_min.is_finite() && ratio_min >= 0.0, "a number from 0")?;
                let is_whole = has_thumbnail || most == 1;
                require("has_thumbnail", has_thumbnail, is_whole, "true, as crops are added to the whole picture")?;
            }
        }
        require("min_pixels", min, min >= 1 && min <= max, "at least 1 and at most max_pixels")?;
        require("max_pixels", max, max <= 1 << 40, "at most 2^40")?;
        let factor = self.rescale_factor;
        require("rescale_factor", factor, factor.is_finite() && factor > 0.0, "above 0")?;
        for mean in self.image_mean {
            require("image_mean", mean, mean.is_finite(), "three finite numbers")?;
        }
        for deviation in self.image_std {
            require("image_std", deviation, deviation.is_finite() && deviation > 0.0, "three numbers above 0")?;
        }
        Ok(())
    }
}

impl RawConfig {
    fn cuts_tiles(&self) -> bool {
        let image = self.image_processor_type.as_deref().or(self.feature_extractor_type.as_deref());
        self.video_processor_type.as_deref() == Some(TILING_VIDEO_PROCESSOR)
            || image.is_some_and(|kind| TILING_PROCESSORS.contains(&kind))
            || image.is_some_and(|kind| MAYBE_TILING_PROCESSORS.contains(&kind)) && self.dynamic_image_size.is_some()
    }

    fn adds_crops(&self) -> bool {
        self.is_one_of(&CROPPING_PROCESSORS)
    }

    fn is_one_of(&self, kinds: &[&str]) -> bool {
        self.image_processor_type.as_deref().is_some_and(|kind| kinds.contains(&kind))
    }

    /// Applies the tile settings on top of the defaults of `GotOcr2ImageProcessor`. That processor
    /// has no patch settings, so the patches have the settings of the only supported vision tower:
    /// 14 pixels, merged two by two. `crop_to_patches` is not read, because the models' own
    /// processor (`processing_internvl.py`) sets it for every picture.
    fn tiled(mut self) -> Result<ImageProcessorConfig, ProcessorError> {
        let crops = self.do_center_crop == Some(true);
        let is_video = self.video_processor_type.is_some();
        require("do_center_crop", crops, !(crops && is_video), "false, as frames are stretched")?;
        require("pad2square", true, self.pad2square != Some(true), "false, as pictures are stretched")?;
        for (setting, pixels) in [("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)] {
            require(setting, pixels.unwrap_or(0), pixels.is_none(), "null for tiles (set `max_patches` instead)")?;
        }
        let side = self.take_side(384)?;
        let tiling = self.tiling(side);
        let default = ImageProcessorConfig { tiling: Some(tiling), ..ImageProcessorConfig::default() };
        let patches = ImageProcessorConfig { temporal_patch_size: 1, ..default };
        let bounds = PixelBounds { min: 1, max: tiling.pixels_max() };
        self.over(ImageProcessorConfig { pixel_bounds: bounds, ..patches })
    }

    /// Applies the settings on top of the defaults of `Gemma3ImageProcessor`. That processor has no
    /// patch settings, so the patches have the settings of the released vision tower unless
    /// `config.json` says otherwise: 14 pixels, pooled four by four. The defaults of pan and scan
    /// are those of `Gemma3Processor`.
    fn cropped(mut self) -> Result<ImageProcessorConfig, ProcessorError> {
        for (setting, pixels) in [("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)] {
            require(setting, pixels.unwrap_or(0), pixels.is_none(), "null, as all pictures have one size")?;
        }
        let side = self.take_side(224)?;
        let rule = CropRule {
            side_min: self.pan_and_scan_min_crop_size.unwrap_or(256),
            ratio_min: self.pan_and_scan_min_ratio_to_activate.unwrap_or(1.2),
        };
        let mut most = 1;
        if self.do_pan_and_scan == Some(true) {
            most = self.pan_and_scan_max_num_crops.unwrap_or(4);
            require("pan_and_scan_max_num_crops", most, (2..=TILES_MAX).contains(&most), "from 2 to 64")?;
        }
        let tiling = Tiling { side, least: 1, most, has_thumbnail: true, cut: TileCut::Crops(rule) };
        self.over(ImageProcessorConfig {
            tiling: Some(tiling),
            pixel_bounds: PixelBounds { min: 1, max: tiling.pixels_max() },
            temporal_patch_size: 1,
            merge_size: 4,
            image_mean: [0.5; 3],
            image_std: [0.5; 3],
            resample: Resample::Bilinear,
            ..ImageProcessorConfig::default()
        })
    }

    /// Takes the side of the square that `size` describes.
    fn take_side(&mut self, default: u32) -> Result<u32, ProcessorError> {
        let side = match self.size.take() {
            None => default,
            Some(Sides::Square(side)) => side,
            Some(Sides::Named(RawSize { height: Some(height), width: Some(width), .. })) if height == width => height,
            Some(Sides::Named(_)) => 0,
        };
        require("size", side, side > 0, "a number above 0, or an equal height and width")?;
        Ok(side)
    }

    /// Tiling with tiles of `side` pixels. transformers' processor always adds a thumbnail. The
    /// code of the original InternVL releases has other defaults.
    fn tiling(&self, side: u32) -> Tiling {
        let is_released = self.dynamic_image_size.is_some();
        let is_cut = self.dynamic_image_size != Some(false);
        let most = self.max_patches.unwrap_or(if is_released { 6 } else { 12 });
        let (least, most) = if is_cut { (self.min_patches.unwrap_or(1), most) } else { (1, 1) };
        Tiling {
            side,
            least,
            most,
            has_thumbnail: !is_released || self.use_thumbnail == Some(true),
            cut: TileCut::Resized,
        }
    }

    fn check_type(&self) -> Result<(), ProcessorError> {
        let found = self.image_processor_type.as_ref().or(self.feature_extractor_type.as_ref());
        match found {
            Some(found) if KNOWN_PROCESSORS.contains(&found.as_str()) => Ok(()),
            found => Err(ProcessorError::UnknownProcessor {
                found: found.cloned().unwrap_or_else(|| "(no image_processor_type)".into()),
                known: [&KNOWN_PROCESSORS[..], &TILING_PROCESSORS, &CROPPING_PROCESSORS, &TOKEN_LIMIT_PROCESSORS]
                    .concat()
                    .join(", "),
            }),
        }
    }
}

fn channels(setting: &'static str, given: Option<Vec<f64>>, default: [f64; 3]) -> Result<[f64; 3], ProcessorError> {
    let Some(given) = given else { return Ok(default) };
    let count = given.len();
    <[f64; 3]>::try_from(given).map_err(|_| ProcessorError::OutOfRange {
        setting,
        value: format!("a list of {count}"),
        range: "a list of 3 numbers",
    })
}

pub(super) fn require(
    setting: &'static str,
    value: impl std::fmt::Display,
    holds: bool,
    range: &'static str,
) -> Result<(), ProcessorError> {
    if holds { Ok(()) } else { Err(ProcessorError::OutOfRange { setting, value: value.to_string(), range }) }
}
