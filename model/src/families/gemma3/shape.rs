//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of google/gemma-3-*-it on huggingface.co. The numbers of
//! parameters that follow from them are the published ones.

use serde_json::{Value, json};

use super::prompt_text::{END, IMAGE, START};
use crate::{
    blocks::decoder_shape::{DecoderShape, ShapeText},
    families::{Files, ReleasedShape, gemma::Gemma3Shape},
};

const TEXT: ShapeText = ShapeText {
    control: &["<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>", START, END, IMAGE],
    // A system turn is a separate turn; the released template puts its text before the first turn
    // of the user.
    template: "{{ bos_token }}{% for message in messages %}<start_of_turn>\
        {{ 'model' if message['role'] == 'assistant' else message['role'] }}\n\
        {% if message['content'] is string %}{{ message['content'] | trim }}{% else %}\
        {% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>\
        {% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}\
        {% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ends: &["<end_of_turn>", "<eos>"],
};

/// Sizes of a model, without its weights.
pub struct Shape {
    text: Gemma3Shape,
    vision: VisionShape,
}

struct VisionShape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    /// Pixels along a side of a picture.
    image_side: usize,
    /// Tokens of a picture.
    tokens: usize,
}

/// SigLIP-400M/14 for pictures of 896 x 896 pixels.
const SIGLIP: VisionShape =
    VisionShape { layers: 27, hidden: 1152, intermediate: 4304, heads: 16, image_side: 896, tokens: 256 };

const fn released(name: &'static str, sizes: [usize; 5], head_dim: usize, query_scalar: usize) -> Shape {
    let decoder = DecoderShape {
        text: TEXT,
        words: 262_144 - 256,
        vocabulary: 262_208,
        head_dim: Some(head_dim),
        ..DecoderShape::small(sizes, 131_072)
    };
    Shape { text: Gemma3Shape { name, decoder, window: 1024, query_scalar }, vision: SIGLIP }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; elements of a head
/// and `query_pre_attn_scalar`.
pub const SHAPES: [Shape; 4] = [
    released("gemma-3-4b", [2560, 10_240, 34, 8, 4], 256, 256),
    released("gemma-3-12b", [3840, 15_360, 48, 16, 8], 256, 256),
    released("gemma-3-27b", [5376, 21_504, 62, 32, 16], 128, 168),
    // Not a released model. It is small enough for a test on any machine. A picture has more tokens
    // than the window.
    Shape {
        text: Gemma3Shape {
            name: "gemma-3-tiny-vl",
            decoder: DecoderShape {
                text: TEXT,
                words: 1000,
                vocabulary: 1024,
                head_dim: Some(64),
                ..DecoderShape::small([96, 256, 4, 4, 2], 4096)
            },
            window: 40,
            query_scalar: 48,
        },
        vision: VisionShape { layers: 2, hidden: 64, intermediate: 96, heads: 2, image_side: 224, tokens: 64 },
    },
];

impl ReleasedShape for Shape {
    fn name(&self) -> &'static str {
        self.text.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.text.decoder
    }

    fn config(&self) -> Value {
        let (Shape { text, vision }, mut of_text) = (self, self.text.config());
        of_text["rope_scaling"] = json!({ "rope_type": "linear", "factor": 8.0 });
        let id = |token| text.decoder.id(token);
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": id(START),
            "eoi_token_index": id(END),
            "image_token_index": id(IMAGE),
            "eos_token_id": of_text["eos_token_id"].clone(),
            "mm_tokens_per_image": vision.tokens,
            "torch_dtype": "bfloat16",
            "text_config": of_text,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "num_hidden_layers": vision.layers,
                "hidden_size": vision.hidden,
                "intermediate_size": vision.intermediate,
                "num_attention_heads": vision.heads,
                "image_size": vision.image_side,
                "patch_size": 14,
                "vision_use_head": false,
            },
        })
    }
}

/// Settings file of the released picture processor, with the picture size of this `config.json`.
pub fn processors(config: &Value) -> Files {
    let side = config["vision_config"]["image_size"].as_u64().unwrap_or(896);
    let settings = json!({
        "image_processor_type": "Gemma3ImageProcessor",
        "size": { "height": side, "width": side },
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
    });
    vec![("preprocessor_config.json", settings.to_string().into_bytes())]
}
