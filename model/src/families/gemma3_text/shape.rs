//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of google/gemma-3-*-it on huggingface.co.

use serde_json::Value;

use crate::blocks::decoder_shape::{DecoderShape, ShapeText};
use crate::families::{ReleasedShape, gemma::Gemma3Shape};

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

const fn text(name: &'static str, sizes: [usize; 5]) -> Gemma3Shape {
    let decoder = DecoderShape {
        text: TEXT,
        words: 262_144 - 256,
        vocabulary: 262_144,
        head_dim: Some(256),
        ..DecoderShape::small(sizes, 32_768)
    };
    Gemma3Shape { name, decoder, window: 512, query_scalar: 256 }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads.
pub const SHAPES: [Gemma3Shape; 3] = [
    text("gemma-3-270m", [640, 2048, 18, 4, 1]),
    text("gemma-3-1b", [1152, 6912, 26, 4, 1]),
    // Not a released model. It is small enough for a test on any machine.
    Gemma3Shape {
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
    },
];

impl ReleasedShape for Gemma3Shape {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.decoder
    }

    fn config(&self) -> Value {
        let mut config = Gemma3Shape::config(self);
        config["architectures"] = ["Gemma3ForCausalLM"].into();
        config
    }
}
