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
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Positions on the time axis per second of a video.
    pub tokens_per_second: usize,
    /// Pixels along a side of an attention window.
    pub window_size: usize,
    /// Layers whose attention covers the whole picture.
    pub fullatt_block_indexes: Vec<usize>,
    /// Width of the decoder.
    pub out_hidden_size: usize,
}

impl VisionConfig {
    /// Merged patches along a side of a window.
    pub fn window_side(&self) -> usize {
        self.window_size / self.tower.patch_size / self.tower.spatial_merge_size
    }

    /// Elements per attention head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.tower.num_heads
    }

    fn check(&self, decoder_hidden: usize) -> Result<(), ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        self.check_sizes()?;
        self.tower.check(self.hidden_size, "silu")?;
        if self.window_side() == 0 {
            return contradiction("vision_config: a window is smaller than a merged patch".to_owned());
        }
        if self.out_hidden_size != decoder_hidden {
            return contradiction(format!(
                "vision_config.out_hidden_size {} is not hidden_size {decoder_hidden}",
                self.out_hidden_size
            ));
        }
        if let Some(index) = self.fullatt_block_indexes.iter().find(|index| **index >= self.tower.depth) {
            return contradiction(format!(
                "vision_config.fullatt_block_indexes names layer {index}, but its depth is {}",
                self.tower.depth
            ));
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.tokens_per_second", self.tokens_per_second, 1 << 10)
    }
}

impl VisionTowerConfig for VisionConfig {
    type Sizes = VisionShape;

    const SHAPES: &'static [mrope::Shape<VisionShape>] = &shape::SHAPES;

    /// Reads `vision_config` on top of the defaults of `Qwen2_5_VLVisionConfig` (transformers 5.17,
    /// `configuration_qwen2_5_vl.py`). The defaults matter because transformers wrote the released
    /// files, and it saves only settings that differ from its defaults.
    fn read(given: &Map<String, Value>, decoder_hidden: usize) -> Result<Self, ConfigError> {
        let defaults = json!({
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 4,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
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
        VideoPlace::Timed { frames: self.tower.temporal_patch_size, tokens_per_second: self.tokens_per_second }
    }
}
