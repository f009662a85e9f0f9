//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers of the decoders are from `config.json` of google/gemma-4-*-it on huggingface.co, as
//! are `use_clipped_linears` and `standardize`. The sizes of the small models' tower are the defaults
//! of transformers 5.17. The tower of the 31B and the 26B-A4B has the published number of parameters
//! (550 million) and the sizes of Gemma 3's tower.

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::{DecoderShape, MixtureShape},
    families::{
        ReleasedShape,
        gemma4_decoder::{Gemma4Shape, PICTURE_TEXT as TEXT, released},
    },
};

/// Sizes of a model, without its weights.
pub struct Shape {
    text: Gemma4Shape,
    vision: VisionShape,
    /// Whether the tokens of a picture attend to one another.
    has_picture_mask: bool,
}

#[derive(Clone, Copy)]
struct VisionShape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    /// Whether the inputs and outputs of projections are clamped.
    clips: bool,
    /// Whether pooled patches are standardized.
    standardizes: bool,
}

const SMALL: VisionShape =
    VisionShape { layers: 16, hidden: 768, intermediate: 3072, heads: 12, clips: true, standardizes: false };
const LARGE: VisionShape =
    VisionShape { layers: 27, hidden: 1152, intermediate: 4304, heads: 16, clips: false, standardizes: true };

/// Decoder of the 26B-A4B, in which experts are added to each MLP.
const MIXED: Gemma4Shape = released("gemma-4-26b-a4b", TEXT, [2816, 2112, 30, 16, 8], 1024, 262_144);

pub const SHAPES: [Shape; 5] = [
    Shape {
        text: Gemma4Shape {
            full_every: 5,
            sharing_layers: 20,
            has_wide_mlp: true,
            layer_embedding: 256,
            ..released("gemma-4-e2b", TEXT, [1536, 6144, 35, 8, 1], 512, 131_072)
        },
        vision: SMALL,
        has_picture_mask: false,
    },
    Shape {
        text: Gemma4Shape {
            sharing_layers: 18,
            layer_embedding: 256,
            ..released("gemma-4-e4b", TEXT, [2560, 10_240, 42, 8, 2], 512, 131_072)
        },
        vision: SMALL,
        has_picture_mask: false,
    },
    Shape {
        text: Gemma4Shape {
            full_kv_heads: Some(4),
            ..released("gemma-4-31b", TEXT, [5376, 21_504, 60, 32, 16], 1024, 262_144)
        },
        vision: LARGE,
        has_picture_mask: true,
    },
    Shape {
        text: Gemma4Shape {
            full_kv_heads: Some(2),
            decoder: DecoderShape {
                mixture: Some(MixtureShape { experts: 128, top: 8, intermediate: 704, shared: None }),
                ..MIXED.decoder
            },
            ..MIXED
        },
        vision: LARGE,
        has_picture_mask: true,
    },
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        text: Gemma4Shape {
            decoder: DecoderShape {
                text: TEXT,
                words: 1000,
                vocabulary: 1024,
                head_dim: Some(64),
                ..DecoderShape::small([96, 256, 4, 4, 2], 4096)
            },
            full_every: 4,
            full_head_dim: 128,
            layer_embedding: 32,
            ..released("gemma-4-tiny-vl", TEXT, [96, 256, 4, 4, 2], 40, 4096)
        },
        vision: VisionShape { layers: 2, hidden: 64, intermediate: 96, heads: 2, clips: true, standardizes: true },
        has_picture_mask: true,
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
        let (Shape { text, vision, has_picture_mask }, mut of_text) = (self, self.text.config());
        if *has_picture_mask {
            of_text["use_bidirectional_attention"] = "vision".into();
        }
        let mut config = json!({
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "tie_word_embeddings": true,
            "torch_dtype": "bfloat16",
            "text_config": of_text,
            "vision_config": {
                "model_type": "gemma4_vision",
                "num_hidden_layers": vision.layers,
                "hidden_size": vision.hidden,
                "intermediate_size": vision.intermediate,
                "num_attention_heads": vision.heads,
                "num_key_value_heads": vision.heads,
                "head_dim": vision.hidden / vision.heads,
                "use_clipped_linears": vision.clips,
                "standardize": vision.standardizes,
            },
        });
        config.as_object_mut().expect("an object").extend(text.picture_tokens());
        config
    }
}
