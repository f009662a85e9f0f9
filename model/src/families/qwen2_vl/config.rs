//! The family's `config.json`.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    blocks::{
        AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WIDTH_MAX, config_keys,
        vision::{PlaceholderTokens, TowerConfig, tower_rope},
    },
    checkpoint::Checkpoint,
    families::Settings,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: VisionConfig,
    pub tokens: PlaceholderTokens,
}

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
    /// Reads `vision_config` on top of the defaults of `Qwen2VLVisionConfig` (transformers 5.17,
    /// `configuration_qwen2_vl.py`).
    fn read(given: &Map<String, Value>) -> Result<Self, ConfigError> {
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
        TowerConfig::read(given, &defaults, &[])
    }

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

impl Config {
    /// Reads `config.json` and checks the checkpoint's processors against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let decoder = DecoderConfig::read_nested(config, &defaults())?;
        let vision = VisionConfig::read(config_keys::part(config, "vision_config")?.unwrap_or(&Map::new()))?;
        vision.check(decoder.hidden)?;
        let (images, videos) = (checkpoint.image_processor.as_ref(), Config::video_processor(checkpoint));
        vision.tower.input().check(images, videos.as_ref())?;
        let tokens = PlaceholderTokens::read(config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }
}

/// Defaults of `Qwen2VLTextConfig` (transformers 5.17, `configuration_qwen2_vl.py`; the
/// sections are from `modeling_qwen2_vl.py`).
fn defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "max_window_layers": 80,
    });
    let axes = AxesRule::Consecutive([16, 24, 24]);
    DecoderDefaults { fields, rope_types: &["default", "mrope"], axes, layer: LayerKind::QkvBias }
}
