//! Qwen3, text only (arXiv 2505.09388): Qwen2.5's decoder with norms of query and key heads instead
//! of biases, and in some sizes a mixture of experts instead of each MLP.

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
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Qwen3ForCausalLM", DENSE), (MIXED_CLASS, MIXED)];

    const GGUF: &'static [GgufArchitecture] =
        &[GgufArchitecture::of_text("qwen3", "Qwen3ForCausalLM", GgufLayers::Attention)];

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let is_mixed =
            checkpoint.model_type() == Some(MIXED) || checkpoint.architectures().any(|name| name == MIXED_CLASS);
        read("", &checkpoint.config, is_mixed).map(Config)
    }

    fn read_text(
        model_type: &str,
        place: &str,
        fields: &Map<String, Value>,
    ) -> Option<Result<DecoderConfig, ConfigError>> {
        [DENSE, MIXED].contains(&model_type).then(|| read(place, fields, model_type == MIXED))
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}

// The `model_type` of models without experts, the `model_type` of models with experts, and the
// architecture name of models with experts.
const DENSE: &str = "qwen3";
const MIXED: &str = "qwen3_moe";
const MIXED_CLASS: &str = "Qwen3MoeForCausalLM";

fn read(place: &str, fields: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError> {
    DecoderConfig::read(place, fields, &if is_mixed { mixed_defaults() } else { defaults() })
}

/// Defaults of `Qwen3MoeConfig` (transformers 5.17, `configuration_qwen3_moe.py`).
fn mixed_defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": false,
        "mlp_only_layers": null,
        "sliding_window": 4096,
    });
    DecoderDefaults { fields, window: WindowRule::AllLayersIfUsed, ..defaults() }
}

/// Defaults of `Qwen3Config` (transformers 5.17, `configuration_qwen3.py`).
fn defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
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
        layer: LayerKind::HeadNorms,
        window: WindowRule::PerLayer,
    }
}
