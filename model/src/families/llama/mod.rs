//! Llama 3 (arXiv 2407.21783) and models with its architecture, text only: SmolLM2 (arXiv
//! 2502.02737) and Mistral 7B (arXiv 2310.06825).

mod shape;

use serde_json::json;

pub use super::row::TextModel as Model;
use super::row::{ReadText, Settings};
use crate::{
    blocks::{AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WindowRule},
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
        DecoderConfig::read("", &checkpoint.config, &defaults).map(Config)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
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
    DecoderDefaults {
        fields,
        rope_types: &["default"],
        axes: AxesRule::One,
        layer: LayerKind::ConfiguredBias,
        window: WindowRule::Never,
    }
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
        "sliding_window": 4096,
    });
    DecoderDefaults { fields, window: WindowRule::AllLayers, ..llama_defaults() }
}
