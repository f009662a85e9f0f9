//! Gemma 4 without pictures.

mod shape;

use serde_json::Value;

pub use super::row::TextModel as Model;
use super::{
    gemma4_decoder::{self, Gemma4Shape},
    row::{ReadText, Settings},
};
use crate::{
    blocks::{ConfigError, DecoderConfig, config_keys},
    checkpoint::{Checkpoint, GgufArchitecture, GgufLayers},
};

/// Configuration of the family, which is only a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config(DecoderConfig);

const UNIFIED: &str = "gemma4_unified_text";

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Gemma4ForCausalLM", "gemma4_text"), ("Gemma4UnifiedForCausalLM", UNIFIED)];

    const GGUF: &'static [GgufArchitecture] = &[GgufArchitecture {
        model_type: "gemma4_text",
        ..GgufArchitecture::of_text("gemma4", "Gemma4ForCausalLM", GgufLayers::Gemma4)
    }];

    type Shape = Gemma4Shape;

    const SHAPES: &'static [Gemma4Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let is_unified = config.get("model_type").and_then(Value::as_str) == Some(UNIFIED);
        let text = config_keys::part(config, "text_config")?;
        let place = if text.is_some() { "text_config." } else { "" };
        gemma4_decoder::refuse_bidirectional(place, text.unwrap_or(config))?;
        DecoderConfig::read_nested(config, &gemma4_decoder::defaults(is_unified)).map(Config)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}
