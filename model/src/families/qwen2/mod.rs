//! Qwen2 and Qwen2.5, text only (arXiv 2407.10671, 2412.15115); QwQ-32B is one.

mod shape;

use serde_json::{Map, Value, json};

pub use shape::{SHAPES, Shape};

use crate::{
    blocks::{
        ConfigError, DecoderDefaults,
        decoder::{Decoder, DecoderConfig},
    },
    flow::{POSITION_AXES, PromptLayout},
    weights::{WeightError, WeightMap},
    workload::Workload,
};

/// `architectures` entries that this family serves.
pub const ARCHITECTURES: &[&str] = &["Qwen2ForCausalLM"];

/// The `model_type` of its configurations.
pub const MODEL_TYPE: &str = "qwen2";

/// Every kind of work except those with pictures.
pub const WORKLOADS: &[Workload] = &[Workload::Prefill, Workload::Decode, Workload::Score, Workload::Choose];

/// The family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The model is a decoder and nothing else.
    pub decoder: DecoderConfig,
}

impl Config {
    /// Reads `config.json`.
    pub fn read(config: &Map<String, Value>) -> Result<Self, ConfigError> {
        Ok(Config { decoder: DecoderConfig::read("", config, &defaults())? })
    }
}

/// The defaults of `Qwen2Config` (transformers 5.17, `configuration_qwen2.py`).
fn defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "max_window_layers": 28,
    });
    DecoderDefaults { fields, rope_types: &["default"], rope_sections: None }
}

/// The family's weights.
pub struct Model {
    /// The model is a decoder and nothing else.
    pub decoder: Decoder,
}

impl Model {
    /// Claims the weights, which released checkpoints name `model.*`.
    pub fn claim(config: Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        Ok(Model { decoder: Decoder::claim(config.decoder, "model", map)? })
    }
}

/// Numbers the tokens' positions from 0, the same on all axes.
pub fn lay_out(tokens: Vec<u32>) -> PromptLayout {
    let positions = (0..tokens.len() as u32).map(|position| [position; POSITION_AXES]).collect();
    PromptLayout { next_position: tokens.len() as u32, tokens, positions, pictures: Vec::new() }
}
