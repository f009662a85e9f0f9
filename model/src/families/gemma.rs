//! The Gemma 3 decoder, shared by the family with pictures and the text-only family.

use serde_json::{Value, json};

use crate::blocks::{AxesRule, DecoderDefaults, LayerKind, WindowRule, decoder_shape::DecoderShape};

/// Defaults of `Gemma3TextConfig` (transformers 5.17, `configuration_gemma3.py`).
pub fn defaults() -> DecoderDefaults {
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

/// Sizes of a decoder, without its weights.
pub struct Gemma3Shape {
    pub name: &'static str,
    pub decoder: DecoderShape,
    /// Tokens of the sliding window.
    pub window: usize,
    /// Attention scores are multiplied by `query_scalar^-0.5`.
    pub query_scalar: usize,
}

impl Gemma3Shape {
    /// The settings of the decoder in `config.json`.
    pub fn config(&self) -> Value {
        let mut config = self.decoder.config();
        let fields = config.as_object_mut().expect("the settings are an object");
        fields.remove("hidden_act");
        fields.remove("use_sliding_window");
        fields.insert("hidden_activation".to_owned(), "gelu_pytorch_tanh".into());
        fields.insert("model_type".to_owned(), "gemma3_text".into());
        fields.insert("query_pre_attn_scalar".to_owned(), self.query_scalar.into());
        fields.insert("rope_local_base_freq".to_owned(), 10_000.0.into());
        fields.insert("sliding_window".to_owned(), self.window.into());
        fields.insert("sliding_window_pattern".to_owned(), 6.into());
        config
    }
}
