//! Settings of a model of this family, for checkpoints with random weights or without weights.

use serde_json::Value;

use crate::blocks::decoder_shape::{DecoderShape, ShapeText};
use crate::families::{
    ReleasedShape,
    gemma4_decoder::{Gemma4Shape, released},
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

pub const SHAPES: [Gemma4Shape; 1] = [
    // Not a released model. It is small enough for a test on any machine.
    Gemma4Shape {
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
        sharing_layers: 2,
        has_wide_mlp: true,
        layer_embedding: 32,
        ..released("gemma-4-tiny", TEXT, [96, 256, 8, 4, 2], 40, 4096)
    },
];

impl ReleasedShape for Gemma4Shape {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.decoder
    }

    fn config(&self) -> Value {
        let mut config = Gemma4Shape::config(self);
        config["architectures"] = ["Gemma4ForCausalLM"].into();
        config
    }
}
