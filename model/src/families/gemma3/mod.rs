//! Gemma 3 (arXiv 2503.19786), text only. The vision tower of a checkpoint with pictures is not
//! read.

mod shape;

use serde_json::json;

pub use super::row::TextModel as Model;
use super::row::{ReadText, Settings};
use crate::{
    blocks::{AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WindowRule},
    checkpoint::Checkpoint,
};
use shape::Shape;

/// Configuration of the family, which is only a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config(DecoderConfig);

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Gemma3ForCausalLM", TEXT), (VISION_CLASS, VISION)];

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    const UNREAD: &'static [&'static str] =
        &["vision_tower", "multi_modal_projector", "model.vision_tower", "model.multi_modal_projector"];

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let has_tower =
            checkpoint.model_type() == Some(VISION) || checkpoint.architectures().any(|name| name == VISION_CLASS);
        let config = &checkpoint.config;
        let decoder = if has_tower {
            DecoderConfig::read_nested(config, &defaults())
        } else {
            DecoderConfig::read("", config, &defaults())
        };
        decoder.map(Config)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}

const TEXT: &str = "gemma3_text";
const VISION: &str = "gemma3";
const VISION_CLASS: &str = "Gemma3ForConditionalGeneration";

/// Defaults of `Gemma3TextConfig` (transformers 5.17, `configuration_gemma3.py`).
fn defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": true,
    });
    DecoderDefaults {
        fields,
        rope_types: &["default"],
        axes: AxesRule::One,
        layer: LayerKind::OutputNorms,
        window: WindowRule::Pattern,
    }
}
