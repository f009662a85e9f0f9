//! Llama 3 (arXiv 2407.21783) and models with its architecture, text only: SmolLM2 (arXiv
//! 2502.02737) and Mistral 7B (arXiv 2310.06825) without its sliding window.

mod shape;

use serde_json::json;

pub use super::row::TextModel as Model;
use super::row::{ReadText, Settings};
use crate::{
    blocks::{AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind},
    checkpoint::{Checkpoint, GgufArchitecture, GgufLayers},
};
use shape::Shape;

/// Configuration of the family, which is only a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config(DecoderConfig);

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("LlamaForCausalLM", LLAMA), ("MistralForCausalLM", MISTRAL)];

    const GGUF: &'static [GgufArchitecture] =
        &[GgufArchitecture::of_text(LLAMA, "LlamaForCausalLM", GgufLayers::PairedAttention)];

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let is_mistral = checkpoint.model_type() == Some(MISTRAL)
            || checkpoint.architectures().any(|name| name == "MistralForCausalLM");
        let defaults = if is_mistral { mistral_defaults() } else { llama_defaults() };
        let decoder = DecoderConfig::read("", &checkpoint.config, &defaults)?;
        let window = match checkpoint.config.get("sliding_window") {
            // Default of `MistralConfig`.
            None if is_mistral => Some(4096),
            window => window.and_then(serde_json::Value::as_u64),
        };
        match window.filter(|window| is_mistral && (*window as usize) < decoder.context_tokens) {
            None => Ok(Config(decoder)),
            Some(window) => Err(ConfigError::Unsupported {
                field: "sliding_window".to_owned(),
                value: window.to_string(),
                supported: "null, or at least max_position_embeddings",
            }),
        }
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }
}

const LLAMA: &str = "llama";
const MISTRAL: &str = "mistral";

/// Defaults of `LlamaConfig` (transformers 5.17, `configuration_llama.py`).
fn llama_defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    });
    DecoderDefaults { fields, rope_types: &["default"], axes: AxesRule::One, layer: LayerKind::ConfiguredBias }
}

/// Defaults of `MistralConfig` (transformers 5.17, `configuration_mistral.py`).
fn mistral_defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    });
    DecoderDefaults { fields, ..llama_defaults() }
}
