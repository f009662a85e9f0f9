//! Qwen2 and Qwen2.5, text only (arXiv 2407.10671, 2412.15115). QwQ-32B belongs to this family.

mod shape;

use serde_json::{Map, Value, json};

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
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Qwen2ForCausalLM", "qwen2")];

    const GGUF: &'static [GgufArchitecture] =
        &[GgufArchitecture::of_text("qwen2", "Qwen2ForCausalLM", GgufLayers::Attention)];

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        Ok(Config(DecoderConfig::read("", &checkpoint.config, &defaults())?))
    }

    fn read_text(
        model_type: &str,
        place: &str,
        fields: &Map<String, Value>,
    ) -> Option<Result<DecoderConfig, ConfigError>> {
        (model_type == "qwen2").then(|| DecoderConfig::read(place, fields, &defaults()))
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}

/// Defaults of `Qwen2Config` (transformers 5.17, `configuration_qwen2.py`).
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
    DecoderDefaults {
        fields,
        rope_types: &["default"],
        axes: AxesRule::One,
        layer: LayerKind::QkvBias,
        window: WindowRule::PerLayer,
    }
}
