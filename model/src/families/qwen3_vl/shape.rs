//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json`, `preprocessor_config.json` and
//! `video_preprocessor_config.json` of Qwen/Qwen3-VL-*-Instruct on huggingface.co (arXiv
//! 2511.21631), as quoted by secondary sources.

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::{DecoderShape, MixtureShape},
    families::deepstack::{Shape, TowerShape},
};

/// Architecture and `model_type` of the dense models, then of the mixture-of-experts models.
pub const ARCHITECTURES: [(&str, &str); 2] =
    [("Qwen3VLForConditionalGeneration", "qwen3_vl"), ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")];

const SMALL_TOWER: TowerShape =
    TowerShape { depth: 24, hidden: 1024, intermediate: 4096, heads: 16, grid: 48, parts: &[5, 11, 17] };
const LARGE_TOWER: TowerShape =
    TowerShape { depth: 27, hidden: 1152, intermediate: 4304, heads: 16, grid: 48, parts: &[8, 16, 24] };

const fn released(name: &'static str, sizes: [usize; 5], is_tied: bool, vision: TowerShape) -> Shape {
    let decoder = DecoderShape::small(sizes, 262_144);
    let decoder = DecoderShape { head_dim: Some(128), rope_theta: 5_000_000.0, is_tied, ..decoder };
    Shape { name, architectures: &ARCHITECTURES, decoder, rope_sections: [24, 20, 20], rope, vision }
}

/// A model in which each layer has 128 experts of width `intermediate`, and each token
/// uses 8 of them.
const fn mixed(name: &'static str, sizes: [usize; 5], intermediate: usize) -> Shape {
    let shape = released(name, sizes, false, LARGE_TOWER);
    let mixture = MixtureShape { experts: 128, top: 8, intermediate, shared: None };
    Shape { decoder: DecoderShape { mixture: Some(mixture), ..shape.decoder }, ..shape }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; whether the output
/// projection is tied to the embedding; vision tower.
pub const SHAPES: [Shape; 8] = [
    released("qwen3-vl-2b", [2048, 6144, 28, 16, 8], true, SMALL_TOWER),
    released("qwen3-vl-4b", [2560, 9728, 36, 32, 8], true, SMALL_TOWER),
    released("qwen3-vl-8b", [4096, 12_288, 36, 32, 8], false, LARGE_TOWER),
    released("qwen3-vl-32b", [5120, 25_600, 64, 64, 8], false, LARGE_TOWER),
    mixed("qwen3-vl-30b-a3b", [2048, 6144, 48, 32, 4], 768),
    mixed("qwen3-vl-235b-a22b", [4096, 12_288, 94, 64, 4], 1536),
    tiny("qwen3-vl-tiny", None),
    tiny("qwen3-vl-moe-tiny", Some(MixtureShape { experts: 8, top: 3, intermediate: 72, shared: None })),
];

/// Not a released model. It is small enough for a test on any machine.
const fn tiny(name: &'static str, mixture: Option<MixtureShape>) -> Shape {
    Shape {
        name,
        architectures: &ARCHITECTURES,
        decoder: DecoderShape {
            words: 1000,
            vocabulary: 1024,
            head_dim: Some(32),
            is_tied: mixture.is_none(),
            mixture,
            ..DecoderShape::small([128, 320, 3, 4, 2], 4096)
        },
        rope_sections: [6, 5, 5],
        rope,
        vision: TowerShape { depth: 3, hidden: 64, intermediate: 176, heads: 2, grid: 8, parts: &[0, 1, 2] },
    }
}

fn rope(_: f64, sections: [usize; 3]) -> (&'static str, Value) {
    ("rope_scaling", json!({ "rope_type": "default", "mrope_interleaved": true, "mrope_section": sections }))
}
