//! Settings of the processors of Gemma 4, which resize every picture and frame to the largest size
//! that fits a token limit.

use super::{
    config::{ImageProcessorConfig, RawConfig, UNIFIED_PROCESSORS, require},
    error::ProcessorError,
    smart_resize::{PixelBounds, Sizing},
};

/// Values of `max_soft_tokens` that these processors accept.
const SOFT_TOKENS: [u64; 5] = [70, 140, 280, 560, 1120];

impl RawConfig {
    /// Applies the settings on top of the defaults of `Gemma4ImageProcessor` and
    /// `Gemma4VideoProcessor`, which differ in the number of tokens. The vision tower maps levels from 0 to 1 to
    /// levels from -1 to 1 (`modeling_gemma4.py`), which the returned mean and deviation include. The
    /// 12B has no tower and reads levels from 0 to 1; each patch of its processors is a token.
    pub(super) fn token_limited(mut self, default_tokens: u64) -> Result<ImageProcessorConfig, ProcessorError> {
        for (setting, pixels) in [("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)] {
            require(setting, pixels.unwrap_or(0), pixels.is_none(), "null (set `max_soft_tokens` instead)")?;
        }
        let tokens = self.max_soft_tokens.unwrap_or(default_tokens);
        require("max_soft_tokens", tokens, SOFT_TOKENS.contains(&tokens), "70, 140, 280, 560 or 1120")?;
        self.size = None;
        let own = [&self.image_processor_type, &self.video_processor_type];
        let is_unified = own.into_iter().flatten().any(|own| UNIFIED_PROCESSORS.contains(&own.as_str()));
        let pooled = self.pooling_kernel_size.unwrap_or(3);
        if is_unified {
            (self.patch_size, self.merge_size) = (self.patch_size.unwrap_or(16).checked_mul(pooled), Some(1));
        } else {
            self.merge_size = Some(pooled);
        }
        let config = self.over(ImageProcessorConfig {
            sizing: Sizing::Largest,
            pixel_bounds: PixelBounds { min: 1, max: 1 },
            patch_size: 16,
            temporal_patch_size: 1,
            image_mean: [0.0; 3],
            image_std: [1.0; 3],
            do_normalize: false,
            ..ImageProcessorConfig::default()
        })?;
        let (mean, deviation) =
            if config.do_normalize { (config.image_mean, config.image_std) } else { ([0.0; 3], [1.0; 3]) };
        let max = tokens * u64::from(config.factor()).pow(2);
        let pixel_bounds = PixelBounds { min: 1, max };
        let (image_mean, image_std) = if is_unified {
            (mean, deviation)
        } else {
            let halves = deviation.map(|deviation| deviation / 2.0);
            ([0, 1, 2].map(|channel| mean[channel] + halves[channel]), halves)
        };
        Ok(ImageProcessorConfig { pixel_bounds, image_mean, image_std, do_normalize: true, ..config })
    }
}
