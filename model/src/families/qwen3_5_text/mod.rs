//! Qwen3.5, 3.6 and 3.8 without pictures: text-only exports of the hybrid decoder, with or without
//! experts.

pub use super::row::TextModel as Model;
use super::row::{NoShape, ReadText, Settings};
use crate::{
    blocks::{ConfigError, DecoderConfig, hybrid},
    checkpoint::Checkpoint,
};

/// Configuration of the family, which is only a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config(DecoderConfig);

// The architecture name of models with experts, and its `model_type`.
const MIXED_CLASS: &str = "Qwen3_5MoeForCausalLM";
const MIXED: &str = "qwen3_5_moe_text";

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Qwen3_5ForCausalLM", "qwen3_5_text"), (MIXED_CLASS, MIXED)];

    type Shape = NoShape;

    const SHAPES: &'static [NoShape] = &[];

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let is_mixed =
            checkpoint.model_type() == Some(MIXED) || checkpoint.architectures().any(|name| name == MIXED_CLASS);
        hybrid::read("", &checkpoint.config, is_mixed).map(Config)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}
