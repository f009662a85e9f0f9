//! The family's `config.json`.

use serde_json::{Map, Value, json};

use crate::{
    blocks::{
        AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, config_keys,
        vision::{DeepstackConfig, PlaceholderTokens, TowerInput},
    },
    checkpoint::Checkpoint,
    families::Settings,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: DeepstackConfig,
    pub tokens: PlaceholderTokens,
}

impl Config {
    /// Reads `config.json` and checks the checkpoint's processors against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let is_mixed =
            checkpoint.model_type() == Some(MIXED) || checkpoint.architectures().any(|name| name == MIXED_CLASS);
        let decoder = decoder(config, is_mixed)?;
        let vision =
            DeepstackConfig::read(config_keys::part(config, "vision_config")?.unwrap_or(&Map::new()), &[8, 16, 24])?;
        vision.check(&decoder)?;
        let (images, videos) = (checkpoint.image_processor.as_ref(), Config::video_processor(checkpoint));
        TowerInput { counts_whole_videos: true, ..vision.tower.input() }.check(images, videos.as_ref())?;
        let tokens = PlaceholderTokens::read(config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }
}

/// Reads `text_config`. `tie_word_embeddings` may be in `text_config`, at the top level, or in both
/// with the same value.
fn decoder(config: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError> {
    config_keys::refuse_unknown("", config)?;
    let none = Map::new();
    let text = config_keys::part(config, "text_config")?.unwrap_or(&none);
    let of_class = if is_mixed { mixed_defaults() } else { defaults() };
    let mut decoder = DecoderConfig::read("text_config.", text, &of_class)?;
    if let Some(mixture) = &mut decoder.mixture {
        // The model always renormalizes, whatever the file says (`modeling_qwen3_vl_moe.py`).
        mixture.renormalised = true;
    }
    decoder.tied_embeddings = config_keys::tied_embeddings(config, text)?;
    Ok(decoder)
}

// Architecture name of the MoE variant, and its `model_type`.
pub(super) const MIXED_CLASS: &str = "Qwen3VLMoeForConditionalGeneration";
pub(super) const MIXED: &str = "qwen3_vl_moe";

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
    DecoderDefaults { fields, rope_types: &["default"], axes, layer: LayerKind::HeadNorms }
}
