//! Gemma 4 without pictures: the decoder of the released models from 2B to 31B, except the mixture.
//! Checkpoints with encoders of pictures and sound are read without these encoders.

mod shape;

use serde_json::{Map, Value, json};

pub use super::row::TextModel as Model;
use super::row::{ReadText, Settings};
use crate::{
    blocks::{AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WindowRule, config_keys},
    checkpoint::Checkpoint,
};
use shape::Shape;

/// Configuration of the family, which is only a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config(DecoderConfig);

const UNIFIED: [&str; 2] = ["gemma4_unified", "gemma4_unified_text"];

/// Defaults of `Gemma4TextConfig`, or of `Gemma4UnifiedTextConfig` if `is_unified` (transformers
/// 5.17, `configuration_gemma4.py` and `configuration_gemma4_unified.py`).
fn defaults(is_unified: bool) -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": false,
        "num_kv_shared_layers": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": if is_unified { 0 } else { 256 },
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": if is_unified { 262_144 } else { 131_072 },
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        "sliding_window": if is_unified { 1024 } else { 512 },
        "tie_word_embeddings": true,
    });
    DecoderDefaults {
        fields,
        rope_types: &["default"],
        axes: AxesRule::One,
        layer: LayerKind::LayerScalars,
        window: WindowRule::PatternButLast,
    }
}

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[
        ("Gemma4ForConditionalGeneration", "gemma4"),
        ("Gemma4ForCausalLM", "gemma4_text"),
        ("Gemma4UnifiedForConditionalGeneration", UNIFIED[0]),
        ("Gemma4UnifiedForCausalLM", UNIFIED[1]),
    ];

    const UNREAD: &'static [&'static str] =
        &["model.vision_tower", "model.embed_vision", "model.vision_embedder", "model.audio_tower", "model.embed_audio"];

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let is_unified = config.get("model_type").and_then(Value::as_str).is_some_and(|kind| UNIFIED.contains(&kind));
        let text = config_keys::part(config, "text_config")?;
        refuse_bidirectional(if text.is_some() { "text_config." } else { "" }, text.unwrap_or(config))?;
        DecoderConfig::read_nested(config, &defaults(is_unified)).map(Config)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.0
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.0
    }
}

/// Refuses models in which tokens of text attend to later tokens. In a text, `vision` changes
/// nothing.
fn refuse_bidirectional(place: &str, fields: &Map<String, Value>) -> Result<(), ConfigError> {
    match fields.get("use_bidirectional_attention") {
        None | Some(Value::Null) => Ok(()),
        Some(value) if value == "vision" => Ok(()),
        Some(value) => Err(ConfigError::Unsupported {
            field: format!("{place}use_bidirectional_attention"),
            value: value.as_str().map_or_else(|| value.to_string(), str::to_owned),
            supported: "null and vision",
        }),
    }
}
