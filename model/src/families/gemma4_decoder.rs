//! The Gemma 4 decoder, shared by the family with pictures and the text-only family.

use serde_json::{Map, Value, json};

use crate::{
    blocks::{
        AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, PictureMask, WindowRule, config_keys,
        decoder_shape::{DecoderShape, ShapeText},
    },
    families::{
        Files,
        gemma4_prompt::{IMAGE, VIDEO},
    },
};

/// Defaults of `Gemma4TextConfig`, or of `Gemma4UnifiedTextConfig` if `is_unified` (transformers
/// 5.17, `configuration_gemma4.py` and `configuration_gemma4_unified.py`).
pub fn defaults(is_unified: bool) -> DecoderDefaults {
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
        "enable_moe_block": false,
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
        rope_types: &["default", "proportional"],
        axes: AxesRule::One,
        layer: LayerKind::LayerScalars,
        window: WindowRule::PatternButLast,
    }
}

/// Reads the decoder of a model with pictures from `text_config`. `is_unified` is as in
/// [`defaults`].
///
/// Picture tokens attend to the whole picture only in sliding-window layers. This also holds for the
/// 12B, as in the authors' implementation (google-deepmind/gemma) and in vLLM. In transformers 5.17,
/// `Gemma4UnifiedForConditionalGeneration` applies the picture mask in all layers, except with a
/// static cache (huggingface/transformers issue 46711).
pub fn read(config: &Map<String, Value>, is_unified: bool) -> Result<DecoderConfig, ConfigError> {
    let none = Map::new();
    let text = config_keys::part(config, "text_config")?.unwrap_or(&none);
    let mut decoder = DecoderConfig::read("text_config.", text, &defaults(is_unified))?;
    config_keys::refuse_unknown("", config)?;
    if [config, text].iter().any(|fields| fields.contains_key("tie_word_embeddings")) {
        decoder.tied_embeddings = config_keys::tied_embeddings(config, text)?;
    }
    refuse_bidirectional("text_config.", text)?;
    let mask = text.get("use_bidirectional_attention");
    if mask.map_or(is_unified, |mask| mask == "vision") {
        decoder.picture_mask = PictureMask::WholePictureInWindows;
    }
    Ok(decoder)
}

/// Refuses models in which tokens of text attend to later tokens. `vision` concerns only tokens of
/// pictures.
pub fn refuse_bidirectional(place: &str, fields: &Map<String, Value>) -> Result<(), ConfigError> {
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

const BEGIN: &str = "<|image>";
const END: &str = "<image|>";

/// Control tokens of Gemma 4 for text and pictures. The template is not the released one.
pub const PICTURE_TEXT: ShapeText = ShapeText {
    control: &["<bos>", "<eos>", "<pad>", "<unk>", "<|turn>", "<turn|>", BEGIN, END, IMAGE, VIDEO],
    template: "{{ bos_token }}{% for message in messages %}<|turn>\
        {{ 'model' if message['role'] == 'assistant' else message['role'] }}\n\
        {% if message['content'] is string %}{{ message['content'] | trim }}{% else %}\
        {% for part in message['content'] %}{% if part['type'] == 'image' %}<|image|>\
        {% elif part['type'] == 'video' %}<|video|>\
        {% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}\
        {% if add_generation_prompt %}<|turn>model\n{% endif %}",
    ends: &["<turn|>", "<eos>"],
};

/// Sizes of a decoder, without its weights.
pub struct Gemma4Shape {
    pub name: &'static str,
    pub decoder: DecoderShape,
    /// Tokens of the sliding window.
    pub window: usize,
    /// Every layer whose number, counted from 1, is a multiple of this number has full attention.
    pub full_every: usize,
    /// Elements of a head of full attention.
    pub full_head_dim: usize,
    /// Key heads of full attention, whose keys also serve as values. `None`: as many key heads as
    /// other layers, with separate values.
    pub full_kv_heads: Option<usize>,
    /// Number of layers at the end that read the keys and values of earlier layers.
    pub sharing_layers: usize,
    /// Whether these layers have an MLP of twice the width.
    pub has_wide_mlp: bool,
    /// Elements of a token's row for one layer; 0 without such rows.
    pub layer_embedding: usize,
}

/// Sizes of a released model without shared keys and values and without embeddings of layers. `sizes`
/// are the hidden width, the MLP width, the layers, the query heads, and the key and value heads.
pub const fn released(
    name: &'static str,
    text: ShapeText,
    sizes: [usize; 5],
    window: usize,
    context_tokens: usize,
) -> Gemma4Shape {
    let decoder = DecoderShape {
        text,
        words: 262_144 - 256,
        vocabulary: 262_144,
        head_dim: Some(256),
        ..DecoderShape::small(sizes, context_tokens)
    };
    Gemma4Shape {
        name,
        decoder,
        window,
        full_every: 6,
        full_head_dim: 512,
        full_kv_heads: None,
        sharing_layers: 0,
        has_wide_mlp: false,
        layer_embedding: 0,
    }
}

impl Gemma4Shape {
    /// The keys of `config.json` for the tokens of pictures and videos, and for the end of a reply.
    pub fn picture_tokens(&self) -> Map<String, Value> {
        let id = |token| Value::from(self.decoder.id(token));
        let keys =
            [("boi", BEGIN), ("eoi", END), ("image", IMAGE), ("video", VIDEO), ("eos", self.decoder.text.ends[0])];
        keys.into_iter().map(|(key, token)| (format!("{key}_token_id"), id(token))).collect()
    }

    /// The settings of the decoder in `config.json`.
    pub fn config(&self) -> Value {
        let mut config = self.decoder.config();
        let fields = config.as_object_mut().expect("the settings are an object");
        let keys = ["hidden_act", "use_sliding_window", "rope_theta"];
        let of_mixture = ["num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"];
        keys.iter().chain(&of_mixture).for_each(|key| drop(fields.remove(*key)));
        let is_full = |layer: usize| (layer + 1).is_multiple_of(self.full_every);
        let kind = |layer| if is_full(layer) { "full_attention" } else { "sliding_attention" };
        let more = json!({
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": (0..self.decoder.layers).map(kind).collect::<Vec<_>>(),
            "sliding_window": self.window,
            "global_head_dim": self.full_head_dim,
            "num_global_key_value_heads": self.full_kv_heads,
            "attention_k_eq_v": self.full_kv_heads.is_some(),
            "num_kv_shared_layers": self.sharing_layers,
            "use_double_wide_mlp": self.has_wide_mlp,
            "hidden_size_per_layer_input": self.layer_embedding,
            "vocab_size_per_layer_input": self.decoder.vocabulary,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": self.decoder.mixture.is_some(),
            "top_k_experts": self.decoder.mixture.map(|mixture| mixture.top),
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
                "sliding_attention": { "rope_type": "default", "rope_theta": 10_000.0 },
            },
        });
        fields.extend(more.as_object().cloned().unwrap_or_default());
        config
    }
}

/// Settings files of the released picture and video processors. `prefix` is the beginning of the
/// processors' class names.
pub fn processors(prefix: &str) -> Files {
    let settings = |key: &str, class: &str, tokens: usize| {
        let settings = json!({
            key: format!("{prefix}{class}"),
            "do_normalize": false,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": tokens,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "resample": 3,
        });
        settings.to_string().into_bytes()
    };
    vec![
        ("preprocessor_config.json", settings("image_processor_type", "ImageProcessor", 280)),
        ("video_preprocessor_config.json", settings("video_processor_type", "VideoProcessor", 70)),
    ]
}
