//! Qwen3-VL (arXiv 2511.21631), with or without experts: a vision tower with full attention
//! and a learned grid of positions, followed by a Qwen3 decoder with interleaved multimodal
//! rotary positions. Intermediate outputs of the tower are added after the decoder's first
//! layers (DeepStack, arXiv 2406.04334).

mod shape;

use serde_json::{Map, Value, json};

use super::{
    deepstack::{self, DeepstackFamily, Shape},
    vision_language_model::VisionLanguageModel,
};
use crate::blocks::{
    AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WindowRule, vision::DeepstackTower,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Family;

impl DeepstackFamily for Family {
    const ARCHITECTURES: &'static [(&'static str, &'static str); 2] = &shape::ARCHITECTURES;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    const DEEPSTACK_LAYERS: &'static [usize] = &[8, 16, 24];

    fn read_decoder(text: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError> {
        let of_class = if is_mixed { mixed_defaults() } else { defaults() };
        let mut decoder = DecoderConfig::read("text_config.", text, &of_class)?;
        if let Some(mixture) = &mut decoder.mixture {
            // The model always renormalizes, whatever the file says (`modeling_qwen3_vl_moe.py`).
            mixture.renormalized = true;
        }
        Ok(decoder)
    }
}

pub type Config = deepstack::Config<Family>;

pub type Model = VisionLanguageModel<DeepstackTower>;

/// Defaults of `Qwen3VLMoeTextConfig` (transformers 5.17, `configuration_qwen3_vl_moe.py`).
fn mixed_defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": true,
        "mlp_only_layers": null,
    });
    DecoderDefaults { fields, ..defaults() }
}

/// Defaults of `Qwen3VLTextConfig` (transformers 5.17, `configuration_qwen3_vl.py`; the
/// sections are from `modeling_qwen3_vl.py`).
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
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
    });
    let axes = AxesRule::Interleaved([24, 20, 20]);
    let (rope_types, layer) = (&["default"], LayerKind::HeadNorms);
    DecoderDefaults { fields, rope_types, axes, layer, window: WindowRule::Never }
}
