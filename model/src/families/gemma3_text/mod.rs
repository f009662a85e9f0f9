//! Gemma 3 (arXiv 2503.19786), text only: the released models of up to 1B.

mod shape;

pub use super::row::TextModel as Model;
use super::{
    gemma::{self, Gemma3Shape},
    row::{ReadText, Settings},
};
use crate::{
    blocks::{ConfigError, DecoderConfig},
    checkpoint::{Checkpoint, GgufArchitecture, GgufLayers},
};

/// Configuration of the family, which is only a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config(DecoderConfig);

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Gemma3ForCausalLM", "gemma3_text")];

    const GGUF: &'static [GgufArchitecture] = &[GgufArchitecture {
        model_type: "gemma3_text",
        ..GgufArchitecture::of_text("gemma3", "Gemma3ForCausalLM", GgufLayers::Gemma3)
    }];

    type Shape = Gemma3Shape;

    const SHAPES: &'static [Gemma3Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        DecoderConfig::read("", &checkpoint.config, &gemma::defaults()).map(Config)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}
