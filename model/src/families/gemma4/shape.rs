//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of google/gemma-4-*-it on huggingface.co.

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::{DecoderShape, ShapeText},
    families::ReleasedShape,
};

/// Control tokens of Gemma 4 for text. The template is not the released one.
const TEXT: ShapeText = ShapeText {
    control: &["<bos>", "<eos>", "<pad>", "<unk>", "<|turn>", "<turn|>"],
    template: "{{ bos_token }}{% for message in messages %}<|turn>\
        {{ 'model' if message['role'] == 'assistant' else message['role'] }}\n\
        {{ message['content'] | trim }}<turn|>\n{% endfor %}\
        {% if add_generation_prompt %}<|turn>model\n{% endif %}",
    ends: &["<turn|>", "<eos>"],
};

/// Sizes of a decoder, without its weights.
pub struct Shape {
    name: &'static str,
    decoder: DecoderShape,
    /// Tokens of the sliding window.
    window: usize,
    /// Every layer whose number, counted from 1, is a multiple of this number has full attention.
    full_every: usize,
    /// Elements of a head of full attention.
    full_head_dim: usize,
    /// Key heads of full attention, whose keys are also the values. `None`: as many as other layers
    /// have, and values of their own.
    full_kv_heads: Option<usize>,
    /// Number of layers at the end that read the keys and values of earlier layers.
    sharing_layers: usize,
    /// Whether these layers have an MLP of twice the width.
    has_wide_mlp: bool,
    /// Elements of a token's row for one layer; 0 without such rows.
    layer_embedding: usize,
}

const fn released(name: &'static str, sizes: [usize; 5], window: usize, context_tokens: usize) -> Shape {
    let decoder = DecoderShape {
        text: TEXT,
        words: 262_144 - 256,
        vocabulary: 262_144,
        head_dim: Some(256),
        ..DecoderShape::small(sizes, context_tokens)
    };
    Shape {
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

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; window and context.
pub const SHAPES: [Shape; 5] = [
    Shape {
        full_every: 5,
        sharing_layers: 20,
        has_wide_mlp: true,
        layer_embedding: 256,
        ..released("gemma-4-e2b", [1536, 6144, 35, 8, 1], 512, 131_072)
    },
    Shape {
        sharing_layers: 18,
        layer_embedding: 256,
        ..released("gemma-4-e4b", [2560, 10_240, 42, 8, 2], 512, 131_072)
    },
    Shape { full_kv_heads: Some(1), ..released("gemma-4-12b", [3840, 15_360, 48, 16, 8], 1024, 262_144) },
    Shape { full_kv_heads: Some(4), ..released("gemma-4-31b", [5376, 21_504, 60, 32, 16], 1024, 262_144) },
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        name: "gemma-4-tiny",
        decoder: DecoderShape {
            text: TEXT,
            words: 1000,
            vocabulary: 1024,
            head_dim: Some(64),
            ..DecoderShape::small([96, 256, 8, 4, 2], 4096)
        },
        window: 40,
        full_every: 4,
        full_head_dim: 128,
        full_kv_heads: None,
        sharing_layers: 2,
        has_wide_mlp: true,
        layer_embedding: 32,
    },
];

impl ReleasedShape for Shape {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.decoder
    }

    fn config(&self) -> Value {
        let mut config = self.decoder.config();
        let fields = config.as_object_mut().expect("the settings are an object");
        ["hidden_act", "use_sliding_window", "rope_theta"].iter().for_each(|key| drop(fields.remove(*key)));
        let is_full = |layer: usize| (layer + 1).is_multiple_of(self.full_every);
        let kind = |layer| if is_full(layer) { "full_attention" } else { "sliding_attention" };
        let more = json!({
            "architectures": ["Gemma4ForCausalLM"],
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
