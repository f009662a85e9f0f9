//! The family's `config.json`.

use bursar_kernels::ops::patchify::PatchSize;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    blocks::{ConfigError, WIDTH_MAX, decoder::DecoderConfig},
    processor::ImageProcessorConfig,
};

/// The family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The text part.
    pub decoder: DecoderConfig,
    /// The vision part.
    pub vision: VisionConfig,
    /// The token that stands for one merged patch of a picture.
    pub image_token: u32,
    /// The token that stands for one merged patch of a video's step; none if the checkpoint has no word for videos.
    pub video_token: Option<u32>,
}

/// The numbers that define the vision tower.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct VisionConfig {
    /// Number of layers.
    pub depth: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Colours of a pixel.
    #[serde(default = "colours")]
    pub in_channels: usize,
    /// The older spelling of `in_channels`; files that were saved again have both.
    in_chans: Option<usize>,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// Patches along a side of a merged patch.
    pub spatial_merge_size: usize,
    /// Frames that a patch spans.
    pub temporal_patch_size: usize,
    /// Positions along the time axis that a second of a video takes.
    #[serde(default = "tokens_per_second")]
    pub tokens_per_second: usize,
    /// Pixels along a side of an attention window.
    pub window_size: usize,
    /// Layers whose attention covers the whole picture.
    pub fullatt_block_indexes: Vec<usize>,
    /// Width of the decoder.
    pub out_hidden_size: usize,
    /// Activation of the MLP.
    #[serde(default = "silu")]
    hidden_act: String,
}

fn colours() -> usize {
    3
}

/// What transformers assumes when the file names none.
fn tokens_per_second() -> usize {
    4
}

fn silu() -> String {
    "silu".to_owned()
}

impl VisionConfig {
    /// What a patch covers. Its colours are three: a tower of others is refused with the processors.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_size, frames: self.temporal_patch_size }
    }

    /// Patches that become one token.
    pub fn merged_patches(&self) -> usize {
        self.spatial_merge_size * self.spatial_merge_size
    }

    /// Merged patches along a side of a window.
    pub fn window_side(&self) -> usize {
        self.window_size / self.patch_size / self.spatial_merge_size
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    fn check(&self, decoder_hidden: usize) -> Result<(), ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        self.check_sizes()?;
        if self.hidden_act != "silu" {
            return Err(ConfigError::Unsupported {
                field: "vision_config.hidden_act",
                value: self.hidden_act.clone(),
                supported: "silu",
            });
        }
        if !self.hidden_size.is_multiple_of(4 * self.num_heads) {
            return contradiction(format!(
                "vision_config: {} heads of {} elements cannot be rotated along two axes",
                self.num_heads, self.hidden_size
            ));
        }
        if self.window_side() == 0 {
            return contradiction("vision_config: a window holds no merged patch".to_owned());
        }
        if self.out_hidden_size != decoder_hidden {
            return contradiction(format!(
                "vision_config.out_hidden_size {} is not hidden_size {decoder_hidden}",
                self.out_hidden_size
            ));
        }
        if let Some(index) = self.fullatt_block_indexes.iter().find(|index| **index >= self.depth) {
            return contradiction(format!(
                "vision_config.fullatt_block_indexes names layer {index}, but its depth is {}",
                self.depth
            ));
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.depth", self.depth, 1 << 12)?;
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.num_heads", self.num_heads, 1 << 12)?;
        ConfigError::check_size("vision_config.in_channels", self.in_channels, 16)?;
        ConfigError::check_size("vision_config.patch_size", self.patch_size, 256)?;
        ConfigError::check_size("vision_config.spatial_merge_size", self.spatial_merge_size, 16)?;
        ConfigError::check_size("vision_config.tokens_per_second", self.tokens_per_second, 1 << 10)?;
        ConfigError::check_size("vision_config.temporal_patch_size", self.temporal_patch_size, 16)
    }

    /// Refuses a processor, of `what`, that cuts other patches than the tower reads.
    fn check_processor(&self, what: &str, processor: &ImageProcessorConfig) -> Result<(), ConfigError> {
        let pairs = [
            ("patch_size", self.patch_size, processor.patch_size),
            ("spatial_merge_size", self.spatial_merge_size, processor.merge_size),
            ("temporal_patch_size", self.temporal_patch_size, processor.temporal_patch_size),
            ("in_channels", self.in_channels, 3),
        ];
        match pairs.iter().find(|(_, tower, processor)| *tower != *processor as usize) {
            None => Ok(()),
            Some((field, tower, processor)) => Err(ConfigError::Contradiction(format!(
                "vision_config.{field} is {tower}, but the {what} processor's is {processor}"
            ))),
        }
    }
}

impl Config {
    /// Reads `config.json`, and holds the checkpoint's processors of pictures and of videos against it.
    pub fn read(
        config: &Value,
        processor: Option<&ImageProcessorConfig>,
        videos: Option<&ImageProcessorConfig>,
    ) -> Result<Self, ConfigError> {
        let processor = processor.ok_or_else(|| {
            ConfigError::Contradiction("the model takes pictures, but there is no preprocessor_config.json".to_owned())
        })?;
        #[derive(Deserialize)]
        struct Fields {
            vision_config: VisionConfig,
            image_token_id: u32,
            video_token_id: Option<u32>,
        }
        let mut fields: Fields = serde_json::from_value(config.clone())?;
        if let Some(channels) = fields.vision_config.in_chans {
            fields.vision_config.in_channels = channels;
        }
        let decoder = DecoderConfig::read(config)?;
        fields.vision_config.check(decoder.hidden)?;
        fields.vision_config.check_processor("image", processor)?;
        videos.map_or(Ok(()), |videos| fields.vision_config.check_processor("video", videos))?;
        let (image_token, video_token) = (fields.image_token_id, fields.video_token_id);
        for (field, token) in [("image_token_id", Some(image_token)), ("video_token_id", video_token)] {
            if let Some(token) = token.filter(|token| *token as usize >= decoder.vocabulary) {
                let vocabulary = decoder.vocabulary;
                let text = format!("{field} is {token}, but vocab_size is {vocabulary}");
                return Err(ConfigError::Contradiction(text));
            }
        }
        if video_token == Some(image_token) {
            let text = format!("image_token_id and video_token_id are both {image_token}");
            return Err(ConfigError::Contradiction(text));
        }
        Ok(Config { decoder, vision: fields.vision_config, image_token, video_token })
    }
}
