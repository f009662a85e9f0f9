//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of google/gemma-3-*-it on huggingface.co. The numbers of
//! parameters that follow from them, with a SigLIP tower of 416,866,032 and a projector, are the
//! published ones. Shapes from 4B on are the text part of a model with pictures.

use serde_json::{Value, json};

use crate::blocks::decoder_shape::{DecoderShape, ShapeText};
use crate::families::ReleasedShape;

/// Control tokens of Gemma 3 for text. In the template, a system turn is a separate turn; the
/// released template puts its text before the first turn of the user.
const TEXT: ShapeText = ShapeText {
    control: &["<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    template: "{{ bos_token }}{% for message in messages %}<start_of_turn>\
        {{ 'model' if message['role'] == 'assistant' else message['role'] }}\n\
        {{ message['content'] | trim }}<end_of_turn>\n{% endfor %}\
        {% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ends: &["<end_of_turn>", "<eos>"],
};

/// Sizes of a model, without its weights.
pub struct Shape {
    name: &'static str,
    decoder: DecoderShape,
    /// Tokens of the sliding window.
    window: usize,
    /// Attention scores are multiplied by the power of -0.5 of this number.
    query_scalar: usize,
    /// Whether the released checkpoint has a vision tower.
    has_tower: bool,
}

const fn text(name: &'static str, sizes: [usize; 5]) -> Shape {
    let decoder = DecoderShape {
        text: TEXT,
        words: 262_144 - 256,
        vocabulary: 262_144,
        head_dim: Some(256),
        ..DecoderShape::small(sizes, 32_768)
    };
    Shape { name, decoder, window: 512, query_scalar: 256, has_tower: false }
}

const fn with_tower(name: &'static str, sizes: [usize; 5], head_dim: usize, query_scalar: usize) -> Shape {
    let Shape { decoder, .. } = text(name, sizes);
    let decoder = DecoderShape { vocabulary: 262_208, head_dim: Some(head_dim), context_tokens: 131_072, ..decoder };
    Shape { name, decoder, window: 1024, query_scalar, has_tower: true }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; elements of a head
/// and `query_pre_attn_scalar` where they differ.
pub const SHAPES: [Shape; 6] = [
    text("gemma-3-270m", [640, 2048, 18, 4, 1]),
    text("gemma-3-1b", [1152, 6912, 26, 4, 1]),
    with_tower("gemma-3-4b", [2560, 10_240, 34, 8, 4], 256, 256),
    with_tower("gemma-3-12b", [3840, 15_360, 48, 16, 8], 256, 256),
    with_tower("gemma-3-27b", [5376, 21_504, 62, 32, 16], 128, 168),
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        name: "gemma-3-tiny",
        decoder: DecoderShape {
            text: TEXT,
            words: 1000,
            vocabulary: 1024,
            head_dim: Some(64),
            ..DecoderShape::small([96, 256, 7, 4, 2], 4096)
        },
        window: 40,
        query_scalar: 48,
        has_tower: false,
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
        fields.remove("hidden_act");
        fields.remove("use_sliding_window");
        fields.insert("hidden_activation".to_owned(), "gelu_pytorch_tanh".into());
        fields.insert("model_type".to_owned(), "gemma3_text".into());
        fields.insert("query_pre_attn_scalar".to_owned(), self.query_scalar.into());
        fields.insert("rope_local_base_freq".to_owned(), 10_000.0.into());
        fields.insert("sliding_window".to_owned(), self.window.into());
        fields.insert("sliding_window_pattern".to_owned(), 6.into());
        if !self.has_tower {
            config["architectures"] = ["Gemma3ForCausalLM"].into();
            return config;
        }
        config["rope_scaling"] = json!({ "rope_type": "linear", "factor": 8.0 });
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": config["eos_token_id"].clone(),
            "torch_dtype": "bfloat16",
            "text_config": config,
        })
    }
}
