//! The family's `config.json`.

use serde::Deserialize;
use serde_json::Value;

use crate::blocks::{ConfigError, decoder::DecoderConfig};

/// The family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The text part.
    pub decoder: DecoderConfig,
    /// The vision part.
    pub vision: VisionConfig,
    /// The token that stands for one merged patch of a picture.
    pub image_token: u32,
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
    #[serde(alias = "in_chans", default = "colours")]
    pub in_channels: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// Patches along a side of a merged patch.
    pub spatial_merge_size: usize,
    /// Frames that a patch spans.
    pub temporal_patch_size: usize,
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

fn silu() -> String {
    "silu".to_owned()
}

impl VisionConfig {
    /// Numbers of a patch: colours, frames, rows, columns.
    pub fn patch_features(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
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
        if self.hidden_act != "silu" {
            return Err(ConfigError::Unsupported {
                field: "vision_config.hidden_act",
                value: self.hidden_act.clone(),
                supported: "silu",
            });
        }
        if self.num_heads == 0 || !self.hidden_size.is_multiple_of(4 * self.num_heads) {
            return contradiction(format!(
                "vision_config: {} heads of {} elements cannot be rotated along two axes",
                self.num_heads, self.hidden_size
            ));
        }
        if self.spatial_merge_size == 0 || self.patch_size == 0 || self.window_side() == 0 {
            return contradiction("vision_config: a window holds no merged patch".to_owned());
        }
        if self.out_hidden_size != decoder_hidden {
            return contradiction(format!(
                "vision_config.out_hidden_size {} is not hidden_size {decoder_hidden}",
                self.out_hidden_size
            ));
        }
        Ok(())
    }
}

impl Config {
    /// Reads `config.json`.
    pub fn read(config: &Value) -> Result<Self, ConfigError> {
        #[derive(Deserialize)]
        struct Fields {
            vision_config: VisionConfig,
            image_token_id: u32,
        }
        let fields: Fields = serde_json::from_value(config.clone())?;
        let decoder = DecoderConfig::read(config)?;
        fields.vision_config.check(decoder.hidden)?;
        Ok(Config { decoder, vision: fields.vision_config, image_token: fields.image_token_id })
    }
}
