//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers of the released model are from `config.json` of google/gemma-4-12B-it on
//! huggingface.co, and from the defaults of transformers 5.17.

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::DecoderShape,
    families::{
        ReleasedShape,
        gemma4_decoder::{Gemma4Shape, PICTURE_TEXT, released},
    },
};

/// Sizes of a model, without its weights.
pub struct Shape {
    text: Gemma4Shape,
    /// Width of projected patches.
    hidden: usize,
}

pub const SHAPES: [Shape; 2] = [
    Shape {
        text: Gemma4Shape {
            full_kv_heads: Some(1),
            ..released("gemma-4-12b", PICTURE_TEXT, [3840, 15_360, 48, 16, 8], 1024, 262_144)
        },
        hidden: 3840,
    },
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        text: Gemma4Shape {
            decoder: DecoderShape {
                text: PICTURE_TEXT,
                words: 1000,
                vocabulary: 1024,
                head_dim: Some(64),
                ..DecoderShape::small([96, 256, 4, 4, 2], 4096)
            },
            full_every: 4,
            full_head_dim: 128,
            ..released("gemma-4-tiny-unified", PICTURE_TEXT, [96, 256, 4, 4, 2], 40, 4096)
        },
        hidden: 64,
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
        let (Shape { text, hidden }, mut of_text) = (self, self.text.config());
        of_text["model_type"] = "gemma4_unified_text".into();
        of_text["use_bidirectional_attention"] = "vision".into();
        let mut config = json!({
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "tie_word_embeddings": true,
            "torch_dtype": "bfloat16",
            "text_config": of_text,
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "mm_embed_dim": hidden,
                "output_proj_dims": hidden,
            },
        });
        config.as_object_mut().expect("an object").extend(text.picture_tokens());
        config
    }
}
