//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` and `preprocessor_config.json` of Qwen/Qwen2-VL-*-Instruct
//! on huggingface.co (arXiv 2409.12191).

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::DecoderShape,
    families::mrope::{self, TowerSizes},
};

type Shape = mrope::Shape<VisionShape>;

/// Sizes of a vision encoder.
pub struct VisionShape {
    depth: usize,
    hidden: usize,
    heads: usize,
}

const fn released(name: &'static str, decoder: DecoderShape) -> Shape {
    Shape { name, decoder, rope_sections: [16, 24, 24], vision: VisionShape { depth: 32, hidden: 1280, heads: 16 } }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; context tokens.
pub const SHAPES: [Shape; 4] = [
    released("qwen2-vl-2b", DecoderShape::small([1536, 8960, 28, 12, 2], 32_768)),
    released("qwen2-vl-7b", DecoderShape::large([3584, 18_944, 28, 28, 4], 32_768)),
    released("qwen2-vl-72b", DecoderShape::large([8192, 29_568, 80, 64, 8], 32_768)),
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        name: "qwen2-vl-tiny",
        decoder: DecoderShape { words: 1000, vocabulary: 1024, ..DecoderShape::large([128, 320, 2, 4, 2], 4096) },
        rope_sections: [4, 6, 6],
        vision: VisionShape { depth: 2, hidden: 64, heads: 2 },
    },
];

impl TowerSizes for VisionShape {
    const ARCHITECTURE: (&'static str, &'static str) = ("Qwen2VLForConditionalGeneration", "qwen2_vl");

    fn vision_config(&self, decoder_hidden: usize) -> Value {
        json!({
            "depth": self.depth,
            "embed_dim": self.hidden,
            "mlp_ratio": 4,
            "num_heads": self.heads,
            "in_chans": 3,
            "hidden_size": decoder_hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        })
    }
}
