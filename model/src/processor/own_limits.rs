//! Plans of pictures with per-picture limits.

use std::ops::RangeInclusive;

use super::image_processor::{ImageProcessor, ResizePlan};
use super::smart_resize::{PixelBounds, Size, Sizing};
use super::tiling::Tiling;
use crate::flow::{ImageError, ResizeLimits};

/// A limit of one picture, with the name that errors use.
struct Limit {
    name: &'static str,
    value: u64,
}

impl Limit {
    /// Returns the value if it is in this range.
    fn within(self, possible: &RangeInclusive<u64>) -> Result<u64, ImageError> {
        let (Limit { name: limit, value }, least, most) = (self, *possible.start(), *possible.end());
        match value {
            value if value < least => Err(ImageError::OwnLimitTooLow { limit, value, least }),
            value if value > most => Err(ImageError::OwnLimitTooHigh { limit, value, most }),
            value => Ok(value),
        }
    }
}

impl ImageProcessor {
    /// Same as [`plan`](Self::plan), with a picture's `own` limits. These limits replace the
    /// processor's bounds. They may not exceed `patches_max`, which applies to every picture.
    ///
    /// Returns the sizes that transformers 5.17 returns if a processor is constructed with
    /// `min_pixels` and `max_pixels` (`models/qwen2_vl/image_processing_qwen2_vl.py`) or with
    /// `max_patches` (`models/got_ocr2/image_processing_got_ocr2.py`). (Arguments of a call to the
    /// processor differ: transformers ignores `min_pixels` and `max_pixels` there unless both are
    /// given.) There are two differences from transformers. If the picture has no minimum and its
    /// maximum is below twice the processor's minimum, the minimum is lowered for this picture. A
    /// minimum of 0 counts as 1. A picture thinner than a merge group may still have more pixels
    /// than its maximum.
    ///
    /// # Errors
    /// The errors of [`plan`](Self::plan); [`ImageError::OwnLimitTooLow`],
    /// [`ImageError::OwnLimitTooHigh`] or [`ImageError::OwnLimitIdle`].
    pub fn plan_own(&self, source: Size, own: ResizeLimits, patches_max: usize) -> Result<ResizePlan, ImageError> {
        let Some(limit) = own.first() else { return self.plan(source.width, source.height) };
        let Some(possible) = self.own_pixels(patches_max) else {
            return Err(ImageError::OwnLimitIdle { limit, reason: "this model's pictures are not resized" });
        };
        let asked = |value| Limit { name: "max_pixels", value }.within(&possible);
        let pixels_max = own.pixels_max.map(asked).transpose()?;
        match self.config().tiling {
            None => {
                let bounds = self.own_bounds(own, pixels_max)?;
                self.plan_by(source, |size, factor| self.config().sizing.choose(size, factor, bounds))
            }
            Some(tiling) => {
                let tiles_max = pixels_max.unwrap_or(*possible.end()) / tiling.tile_pixels();
                self.plan_tiles(source, own_tiles(tiling, own, tiles_max)?, tiles_max)
            }
        }
    }

    /// Range of `pixels_max` that a picture may ask for if every picture has at most `patches_max`
    /// patches: from one token or tile up to all patches, and for tiles at most the processor's
    /// maximum. `None` if pictures are not resized.
    pub fn own_pixels(&self, patches_max: usize) -> Option<RangeInclusive<u64>> {
        let config = self.config();
        let pixels_max = (patches_max as u64).saturating_mul(u64::from(config.patch_size).pow(2));
        let possible = match config.tiling {
            None => u64::from(config.factor()).pow(2)..=pixels_max,
            Some(tiling) => {
                let tiles_max = config.pixel_bounds.max.min(pixels_max) / tiling.tile_pixels();
                tiling.tile_pixels()..=tiles_max.max(1) * tiling.tile_pixels()
            }
        };
        config.do_resize.then_some(possible)
    }

    /// Maximum `tiles_max` that a picture may ask for. `None` if pictures are not cut into tiles.
    pub fn own_tiles(&self, patches_max: usize) -> Option<u32> {
        let (tiling, possible) = self.config().tiling.zip(self.own_pixels(patches_max))?;
        Some(most_tiles(tiling, possible.end() / tiling.tile_pixels()))
    }

    /// Bounds of a picture with its own maximum `pixels_max`.
    fn own_bounds(&self, own: ResizeLimits, pixels_max: Option<u64>) -> Result<PixelBounds, ImageError> {
        if own.tiles_max.is_some() {
            return Err(ImageError::OwnLimitIdle {
                limit: "tiles",
                reason: "this model does not cut pictures into tiles",
            });
        }
        if own.pixels_min.is_some() && self.config().sizing == Sizing::Largest {
            let reason = "this model's pictures always have the largest size within `max_pixels`";
            return Err(ImageError::OwnLimitIdle { limit: "min_pixels", reason });
        }
        let bounds = self.config().pixel_bounds;
        let max = pixels_max.unwrap_or(bounds.max);
        match own.pixels_min {
            // With a minimum of 0 pixels, a small picture would be resized to nothing.
            Some(value) => {
                let min = Limit { name: "min_pixels", value }.within(&(0..=max))?.max(1);
                Ok(PixelBounds { min, max })
            }
            None => Ok(PixelBounds { min: bounds.min.min(max), max }.within(max)),
        }
    }
}

/// Tiling of a picture of at most `tiles_max` tiles, including the thumbnail.
fn own_tiles(tiling: Tiling, own: ResizeLimits, tiles_max: u64) -> Result<Tiling, ImageError> {
    if own.pixels_min.is_some() {
        let reason = "this model's pictures are cut into tiles of one size";
        return Err(ImageError::OwnLimitIdle { limit: "min_pixels", reason });
    }
    let Some(value) = own.tiles_max.map(u64::from) else { return Ok(tiling) };
    let possible = 1..=most_tiles(tiling, tiles_max).into();
    let most = Limit { name: "tiles", value }.within(&possible)? as u32;
    Ok(Tiling { least: tiling.least.min(most), most, ..tiling })
}

/// Maximum number of tiles without the thumbnail, if `tiles_max` includes the thumbnail.
fn most_tiles(tiling: Tiling, tiles_max: u64) -> u32 {
    let thumbnail = u64::from(tiling.has_thumbnail && tiles_max > 1);
    u64::from(tiling.most).min(tiles_max - thumbnail).max(1) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::processor::ImageProcessorConfig;
    use crate::processor::tiling::TileCut;

    const FREE: usize = 1 << 20;

    fn qwen() -> ImageProcessor {
        ImageProcessor::new(ImageProcessorConfig::default()).expect("valid settings")
    }

    fn internvl() -> ImageProcessor {
        let tiling = Tiling { side: 448, least: 1, most: 12, has_thumbnail: true, cut: TileCut::Resized };
        let pixel_bounds = PixelBounds { min: 1, max: tiling.pixels_max() };
        let config = ImageProcessorConfig { tiling: Some(tiling), pixel_bounds, ..ImageProcessorConfig::default() };
        ImageProcessor::new(config).expect("valid settings")
    }

    fn pixels(min: impl Into<Option<u64>>, max: impl Into<Option<u64>>) -> ResizeLimits {
        ResizeLimits { pixels_min: min.into(), pixels_max: max.into(), tiles_max: None }
    }

    fn tiles(most: u32) -> ResizeLimits {
        ResizeLimits { tiles_max: Some(most), ..ResizeLimits::default() }
    }

    const WIDE: Size = Size { width: 4000, height: 3000 };

    /// `image_grid_thw` of `Qwen2VLImageProcessor(min_pixels=.., max_pixels=..)` in transformers
    /// 5.17.
    #[test]
    fn planned_grids_match_transformers() {
        let sizes = [(190, 130), (4000, 3000), (640, 480), (30, 30)];
        let recorded = [
            (pixels(3136, 3136), [(2, 4), (2, 4), (2, 4), (4, 4)]),
            (pixels(None, 512 * 512), [(10, 14), (30, 42), (30, 42), (4, 4)]),
            (pixels(100_000, None), [(20, 28), (60, 82), (34, 46), (24, 24)]),
            (pixels(20_000, 40_000), [(10, 14), (12, 16), (12, 16), (12, 12)]),
        ];
        for (own, grids) in recorded {
            let planned = sizes.map(|(width, height)| {
                let grid = qwen().plan_own(Size { width, height }, own, FREE).expect("a plan").grid;
                (grid.h, grid.w)
            });
            assert_eq!(planned, grids, "{own:?}");
        }
    }

    #[test]
    fn the_limits_of_a_picture_replace_the_models_limits() {
        let planned = |own| qwen().plan_own(WIDE, own, FREE).expect("a plan").resized.pixels();
        assert!(planned(pixels(None, 512 * 512)) <= 512 * 512);
        assert!(
            planned(ResizeLimits::default()) <= 28 * 28 * 1280
                && planned(pixels(None, 28 * 28 * 2560)) > 28 * 28 * 1280
        );
        let small = Size { width: 30, height: 30 };
        let planned = |own| qwen().plan_own(small, own, FREE).expect("a plan").resized.pixels();
        assert_eq!((planned(pixels(0, None)), planned(ResizeLimits::default())), (28 * 28, 56 * 56));
        assert!(planned(pixels(100_000, None)) >= 100_000);
        assert_eq!(planned(pixels(None, 28 * 28)), 28 * 28, "the request's limit lowers the model's minimum");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn plans_stay_within_the_pictures_limits_and_the_envelope(
            (width, height, max, patches) in (1u32..5000, 1u32..5000, 784u64..2_000_000, 4usize..20_000),
            most in 1u32..20,
        ) {
            let source = Size { width, height };
            if let Ok(plan) = qwen().plan_own(source, pixels(None, max), patches) {
                let is_thin = plan.resized.width.min(plan.resized.height) == 28;
                prop_assert!(is_thin || plan.resized.pixels() <= max && plan.patches <= patches, "{plan:?}");
            } else {
                let is_long = width.max(height) > 200 * width.min(height);
                prop_assert!(is_long || max > 196 * patches as u64, "refused: {max} of {patches}");
            }
            for own in [tiles(most), pixels(None, max)] {
                let Ok(plan) = internvl().plan_own(source, own, patches) else { continue };
                let tiles = plan.tiles.expect("tiles");
                prop_assert!(plan.patches <= patches.max(1024), "{plan:?}");
                prop_assert!(own.tiles_max.is_none_or(|most| tiles.columns * tiles.rows <= most), "{plan:?}");
                prop_assert!(own.pixels_max.is_none_or(|max| tiles.count() as u64 * 448 * 448 <= max), "{plan:?}");
            }
        }
    }

    #[test]
    fn a_pictures_limits_reduce_its_tiles() {
        let count = |own| internvl().plan_own(WIDE, own, FREE).expect("a plan").tiles.expect("tiles").count();
        assert_eq!([ResizeLimits::default(), tiles(12), tiles(6), tiles(1)].map(count), [13, 13, 7, 1]);
        assert_eq!(
            (count(pixels(None, 448 * 448)), count(pixels(None, 7 * 448 * 448))),
            (1, 7),
            "the limit includes the thumbnail"
        );
        // The limit is four tiles, one of which is the thumbnail.
        let panorama = Size { width: 3000, height: 1000 };
        let within = |own| internvl().plan_own(panorama, own, 4 * 1024).map(|plan| plan.tiles.expect("tiles").count());
        assert_eq!((within(tiles(3)), within(tiles(2))), (Ok(4), Ok(3)));
        assert_eq!(within(tiles(4)), Err(ImageError::OwnLimitTooHigh { limit: "tiles", value: 4, most: 3 }));
        let one = |own| internvl().plan_own(panorama, own, 1024).map(|plan| plan.patches);
        assert_eq!((one(tiles(1)), one(pixels(None, 448 * 448))), (Ok(1024), Ok(1024)));
    }

    #[test]
    fn the_allowed_ranges_of_picture_limits_are_reported() {
        assert_eq!((qwen().own_pixels(1024), qwen().own_tiles(1024)), (Some(784..=200_704), None));
        let tile = 448 * 448;
        assert_eq!((internvl().own_pixels(4 * 1024 + 9), internvl().own_tiles(4096)), (Some(tile..=4 * tile), Some(3)));
        assert_eq!((internvl().own_pixels(FREE), internvl().own_tiles(FREE)), (Some(tile..=13 * tile), Some(12)));
        let fixed = ImageProcessorConfig { do_resize: false, ..ImageProcessorConfig::default() };
        assert_eq!(ImageProcessor::new(fixed).expect("valid settings").own_pixels(1024), None);
    }

    #[test]
    fn impossible_picture_limits_are_refused_with_both_numbers() {
        let refused = |processor: ImageProcessor, own| {
            processor.plan_own(WIDE, own, 1024).expect_err("the request's own limits are refused")
        };
        let too_high = |limit, value, most| ImageError::OwnLimitTooHigh { limit, value, most };
        let too_low = |limit, value, least| ImageError::OwnLimitTooLow { limit, value, least };
        assert_eq!(refused(qwen(), pixels(None, 200_705)), too_high("max_pixels", 200_705, 200_704));
        assert_eq!(refused(qwen(), pixels(None, 783)), too_low("max_pixels", 783, 784));
        assert_eq!(refused(qwen(), pixels(9_001, 9_000)), too_high("min_pixels", 9_001, 9_000));
        assert_eq!(refused(internvl(), pixels(None, 200_703)), too_low("max_pixels", 200_703, 200_704));
        assert_eq!(refused(internvl(), tiles(0)), too_low("tiles", 0, 1));
        let idle = |error| matches!(error, ImageError::OwnLimitIdle { .. });
        assert!(idle(refused(qwen(), tiles(1))) && idle(refused(internvl(), pixels(1, None))));
        let fixed = ImageProcessorConfig { do_resize: false, ..ImageProcessorConfig::default() };
        assert!(idle(refused(ImageProcessor::new(fixed).expect("valid settings"), pixels(None, 9_000))));
    }
}
