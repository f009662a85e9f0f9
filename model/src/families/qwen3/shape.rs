//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of Qwen/Qwen3-* on huggingface.co (arXiv 2505.09388, table
//! 1).

use serde_json::Value;

use crate::blocks::decoder_shape::{DecoderShape, MixtureShape};
use crate::families::ReleasedShape;

/// Sizes of a model, without its weights.
pub struct Shape {
    name: &'static str,
    decoder: DecoderShape,
}

const fn released(name: &'static str, sizes: [usize; 5], is_tied: bool) -> Shape {
    let decoder = DecoderShape::small(sizes, 40_960);
    Shape { name, decoder: DecoderShape { head_dim: Some(128), is_tied, ..decoder } }
}

/// A model in which each layer has 128 experts of width `intermediate`, and each token
/// uses 8 of them.
const fn mixed(name: &'static str, sizes: [usize; 5], intermediate: usize) -> Shape {
    let Shape { decoder, .. } = released(name, sizes, false);
    let mixture = MixtureShape { experts: 128, top: 8, intermediate, shared: None };
    Shape { name, decoder: DecoderShape { mixture: Some(mixture), ..decoder } }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; whether the output
/// projection is tied to the embedding.
pub const SHAPES: [Shape; 9] = [
    released("qwen3-0.6b", [1024, 3072, 28, 16, 8], true),
    released("qwen3-1.7b", [2048, 6144, 28, 16, 8], true),
    released("qwen3-4b", [2560, 9728, 36, 32, 8], true),
    released("qwen3-8b", [4096, 12_288, 36, 32, 8], false),
    released("qwen3-14b", [5120, 17_408, 40, 40, 8], false),
    released("qwen3-32b", [5120, 25_600, 64, 64, 8], false),
    mixed("qwen3-30b-a3b", [2048, 6144, 48, 32, 4], 768),
    mixed("qwen3-235b-a22b", [4096, 12_288, 94, 64, 4], 1536),
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        name: "qwen3-moe-tiny",
        decoder: DecoderShape {
            words: 1000,
            vocabulary: 1024,
            head_dim: Some(32),
            is_tied: false,
            mixture: Some(MixtureShape { experts: 8, top: 3, intermediate: 72, shared: None }),
            ..DecoderShape::small([128, 320, 3, 4, 2], 4096)
        },
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
        let (class, kind) = match self.decoder.mixture {
            Some(_) => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            None => ("Qwen3ForCausalLM", "qwen3"),
        };
        config["architectures"] = [class].into();
        config["model_type"] = kind.into();
        config["attention_bias"] = false.into();
        config
    }
}
