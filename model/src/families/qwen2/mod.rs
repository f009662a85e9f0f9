//! Qwen2 and Qwen2.5, text only (arXiv 2407.10671, 2412.15115); QwQ-32B is one.

mod shape;

use serde_json::Value;

pub use shape::{SHAPES, Shape};

use crate::{
    blocks::{
        ConfigError,
        decoder::{Decoder, DecoderConfig},
    },
    flow::{POSITION_AXES, PromptLayout},
    strain::Strain,
    weights::{WeightError, WeightMap},
};

/// `architectures` entries that this family serves.
pub const ARCHITECTURES: &[&str] = &["Qwen2ForCausalLM"];

/// What serving it asks of a device.
pub const STRAINS: &[Strain] = &[Strain::Prefill, Strain::Decode, Strain::Score, Strain::Choose];

/// The family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The decoder is all there is.
    pub decoder: DecoderConfig,
}

impl Config {
    /// Reads `config.json`.
    pub fn read(config: &Value) -> Result<Self, ConfigError> {
        Ok(Config { decoder: DecoderConfig::read(config)? })
    }
}

/// The family's weights.
pub struct Model {
    /// The decoder is all there is.
    pub decoder: Decoder,
}

impl Model {
    /// Claims the weights.
    pub fn claim(config: Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        Ok(Model { decoder: Decoder::claim(config.decoder, map)? })
    }
}

/// Text takes one position after the other.
pub fn lay_out(tokens: Vec<u32>) -> PromptLayout {
    let positions = (0..tokens.len() as u32).map(|position| [position; POSITION_AXES]).collect();
    PromptLayout { next_position: tokens.len() as u32, tokens, positions, pictures: Vec::new() }
}
