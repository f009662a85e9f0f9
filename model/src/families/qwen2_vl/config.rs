//! Settings of the vision tower.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::shape::{self, VisionShape};
use crate::{
    blocks::{
        ConfigError, WIDTH_MAX,
        vision::{TowerConfig, VideoPlace, tower_rope},
    },
    families::mrope::{self, VisionTowerConfig},
};

pub type Config = mrope::Config<VisionConfig>;

/// Sizes and settings of the vision tower.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct VisionConfig {
    /// Settings shared with the towers of other families.
    #[serde(flatten)]
    pub tower: TowerConfig,
    /// Width of the residual stream.
    pub embed_dim: usize,
    /// Width of the MLP, as a multiple of the residual stream's width.
    pub mlp_ratio: usize,
    /// Width of the decoder.
    pub hidden_size: usize,
}

impl VisionConfig {
    fn check(&self, decoder_hidden: usize) -> Result<(), ConfigError> {
        self.check_sizes()?;
        self.tower.check(self.embed_dim, "quick_gelu")?;
        if self.hidden_size != decoder_hidden {
            let text = format!("vision_config.hidden_size {} is not hidden_size {decoder_hidden}", self.hidden_size);
            return Err(ConfigError::Contradiction(text));
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.embed_dim", self.embed_dim, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.mlp_ratio", self.mlp_ratio, 64)
    }
}

impl VisionTowerConfig for VisionConfig {
    type Sizes = VisionShape;

    const SHAPES: &'static [mrope::Shape<VisionShape>] = &shape::SHAPES;

    /// Reads `vision_config` on top of the defaults of `Qwen2VLVisionConfig` (transformers 5.17,
    /// `configuration_qwen2_vl.py`).
    fn read(given: &Map<String, Value>, decoder_hidden: usize) -> Result<Self, ConfigError> {
        let defaults = json!({
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "rope_theta": tower_rope::THETA,
        });
        let config: Self = TowerConfig::read(given, &defaults, &[])?;
        config.check(decoder_hidden)?;
        Ok(config)
    }

    fn tower(&self) -> &TowerConfig {
        &self.tower
    }

    fn video_place(&self) -> VideoPlace {
        VideoPlace::Counted
    }
}
