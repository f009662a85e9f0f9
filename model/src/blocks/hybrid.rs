//! Configuration of the decoders of Qwen3.5 and later: three layers with a gated delta net for each
//! layer with attention. Models with pictures and text-only exports of these models share this
//! configuration.

use serde_json::{Map, Value, json};

use super::{AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WindowRule};

/// Reads the text fields of a `config.json`. `place` is the fields' prefix in errors.
pub fn read(place: &str, fields: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError> {
    let mut decoder = DecoderConfig::read(place, fields, &defaults(is_mixed))?;
    if let Some(mixture) = &mut decoder.mixture {
        // The model always renormalizes, whatever the file says (`modeling_qwen3_5_moe.py`).
        mixture.renormalized = true;
    }
    Ok(decoder)
}

/// Defaults of `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig` (transformers 5.17,
/// `configuration_qwen3_5.py` and `configuration_qwen3_5_moe.py`).
fn defaults(is_mixed: bool) -> DecoderDefaults {
    let mut fields = json!({
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    });
    if is_mixed {
        let mixture = json!({
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": true,
            "decoder_sparse_step": 1,
            "mlp_only_layers": null,
        });
        fields.as_object_mut().expect("an object").extend(mixture.as_object().expect("an object").clone());
    }
    let axes = AxesRule::Interleaved([11, 11, 10]);
    let (rope_types, layer) = (&["default"], LayerKind::Hybrid);
    DecoderDefaults { fields, rope_types, axes, layer, window: WindowRule::Never }
}
