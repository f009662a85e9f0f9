//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` and `preprocessor_config.json` of Qwen/Qwen2.5-VL-*-Instruct
//! on huggingface.co. Table 1 of arXiv 2502.13923 gives all towers an MLP of 3,456, but the 3B and
//! 7B towers were released with 3,420.

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::DecoderShape,
    families::mrope::{self, TowerSizes},
};

type Shape = mrope::Shape<VisionShape>;

/// Sizes of a tower.
pub struct VisionShape {
    depth: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    full_attention: &'static [usize],
}

const fn released(name: &'static str, decoder: DecoderShape, tower_intermediate: usize) -> Shape {
    let (intermediate, full_attention) = (tower_intermediate, &[7, 15, 23, 31]);
    let vision = VisionShape { depth: 32, hidden: 1280, intermediate, heads: 16, full_attention };
    Shape { name, decoder, rope_sections: [16, 24, 24], vision }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; context tokens; MLP
/// width of the tower.
pub const SHAPES: [Shape; 5] = [
    released("qwen2.5-vl-3b", DecoderShape::small([2048, 11_008, 36, 16, 2], 128_000), 3420),
    released("qwen2.5-vl-7b", DecoderShape::large([3584, 18_944, 28, 28, 4], 128_000), 3420),
    released("qwen2.5-vl-32b", DecoderShape::large([5120, 27_648, 64, 40, 8], 128_000), 3456),
    released("qwen2.5-vl-72b", DecoderShape::large([8192, 29_568, 80, 64, 8], 128_000), 3456),
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        name: "qwen2.5-vl-tiny",
        decoder: DecoderShape { words: 1000, vocabulary: 1024, ..DecoderShape::large([128, 320, 2, 4, 2], 4096) },
        rope_sections: [4, 6, 6],
        vision: VisionShape { depth: 2, hidden: 64, intermediate: 176, heads: 2, full_attention: &[1] },
    },
];

impl TowerSizes for VisionShape {
    const ARCHITECTURE: (&'static str, &'static str) = ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl");

    fn vision_config(&self, decoder_hidden: usize) -> Value {
        json!({
            "depth": self.depth,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_heads": self.heads,
            "in_chans": 3,
            "out_hidden_size": decoder_hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": self.full_attention,
        })
    }
}
