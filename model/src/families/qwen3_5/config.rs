//! The family's `config.json`.

use serde_json::Map;

use crate::{
    blocks::{
        ConfigError, DecoderConfig, config_keys, hybrid,
        vision::{DeepstackConfig, PlaceholderTokens, TowerInput},
    },
    checkpoint::Checkpoint,
    families::Settings,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: DeepstackConfig,
    pub tokens: PlaceholderTokens,
}

// Architecture name of the variant with experts, and its `model_type`.
pub(super) const MIXED_CLASS: &str = "Qwen3_5MoeForConditionalGeneration";
pub(super) const MIXED: &str = "qwen3_5_moe";

/// Default ids of the placeholders of pictures and videos (transformers 5.17, `Qwen3_5Config`).
const PLACEHOLDERS: [u32; 2] = [248_056, 248_057];

impl Config {
    /// Reads `config.json` and checks the checkpoint's processors against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        config_keys::refuse_unknown("", config)?;
        let is_mixed =
            checkpoint.model_type() == Some(MIXED) || checkpoint.architectures().any(|name| name == MIXED_CLASS);
        let none = Map::new();
        let text = config_keys::part(config, "text_config")?.unwrap_or(&none);
        let mut decoder = hybrid::read("text_config.", text, is_mixed)?;
        decoder.tied_embeddings = config_keys::tied_embeddings(config, text)?;
        let vision = DeepstackConfig::read(config_keys::part(config, "vision_config")?.unwrap_or(&none), &[])?;
        vision.check(&decoder)?;
        let (images, videos) = (checkpoint.image_processor.as_ref(), Config::video_processor(checkpoint));
        TowerInput { counts_whole_videos: true, ..vision.tower.input() }.check(images, videos.as_ref())?;
        let tokens = PlaceholderTokens::read_over(PLACEHOLDERS, config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }
}
