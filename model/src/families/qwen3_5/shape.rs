//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of Qwen/Qwen3.5-* on huggingface.co, as quoted by secondary
//! sources. The processors are those of Qwen3-VL.

use serde_json::{Value, json};

use crate::{
    blocks::decoder_shape::{DecoderShape, DeltaShape, MixtureShape},
    families::deepstack::{Shape, TowerShape},
};

/// The architecture and `model_type` without experts, and then with experts.
pub const ARCHITECTURES: [(&str, &str); 2] =
    [("Qwen3_5ForConditionalGeneration", "qwen3_5"), ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")];

/// Text tokens of the released vocabulary.
const WORDS: usize = 248_044;

const fn tower([depth, hidden, heads, intermediate]: [usize; 4]) -> TowerShape {
    TowerShape { depth, hidden, intermediate, heads, grid: 48, parts: &[] }
}

const SMALLEST_TOWER: TowerShape = tower([12, 768, 12, 3072]);
const SMALL_TOWER: TowerShape = tower([24, 1024, 16, 4096]);
const LARGE_TOWER: TowerShape = tower([27, 1152, 16, 4304]);

const fn released(
    name: &'static str,
    sizes: [usize; 5],
    value_heads: usize,
    is_tied: bool,
    vision: TowerShape,
) -> Shape {
    let decoder = DecoderShape {
        words: WORDS,
        vocabulary: 248_320,
        head_dim: Some(256),
        rope_theta: 10_000_000.0,
        is_tied,
        delta: Some(DeltaShape { key_heads: 16, value_heads, head_dim: 128 }),
        ..DecoderShape::small(sizes, 262_144)
    };
    Shape { name, architectures: &ARCHITECTURES, decoder, rope_sections: [11, 11, 10], rope, vision }
}

/// A model in which each layer has `experts` experts and a shared expert, all of width
/// `intermediate`, and each token uses `top` of the experts.
const fn mixed(
    name: &'static str,
    sizes: [usize; 5],
    value_heads: usize,
    [experts, top, intermediate]: [usize; 3],
) -> Shape {
    let shape = released(name, sizes, value_heads, false, LARGE_TOWER);
    let mixture = MixtureShape { experts, top, intermediate, shared: Some(intermediate) };
    Shape { decoder: DecoderShape { mixture: Some(mixture), ..shape.decoder }, ..shape }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; value heads of gated
/// delta nets; whether the output projection is tied to the embedding; vision tower.
pub const SHAPES: [Shape; 10] = [
    released("qwen3.5-0.8b", [1024, 3584, 24, 8, 2], 16, true, SMALLEST_TOWER),
    released("qwen3.5-2b", [2048, 6144, 24, 8, 2], 16, true, SMALL_TOWER),
    released("qwen3.5-4b", [2560, 9216, 32, 16, 4], 32, true, SMALL_TOWER),
    released("qwen3.5-9b", [4096, 12_288, 32, 16, 4], 32, false, LARGE_TOWER),
    released("qwen3.5-27b", [5120, 17_408, 64, 24, 4], 48, false, LARGE_TOWER),
    mixed("qwen3.5-35b-a3b", [2048, 512, 40, 16, 2], 32, [256, 8, 512]),
    mixed("qwen3.5-122b-a10b", [3072, 1024, 48, 32, 2], 64, [256, 8, 1024]),
    mixed("qwen3.5-397b-a17b", [4096, 1024, 60, 32, 2], 64, [512, 10, 1024]),
    tiny("qwen3.5-tiny", None),
    tiny("qwen3.5-moe-tiny", Some(MixtureShape { experts: 8, top: 3, intermediate: 72, shared: Some(40) })),
];

/// Not a released model: small enough for a test on any machine.
const fn tiny(name: &'static str, mixture: Option<MixtureShape>) -> Shape {
    Shape {
        name,
        architectures: &ARCHITECTURES,
        decoder: DecoderShape {
            words: 1000,
            vocabulary: 1024,
            head_dim: Some(64),
            rope_theta: 10_000_000.0,
            is_tied: mixture.is_none(),
            mixture,
            delta: Some(DeltaShape { key_heads: 2, value_heads: 4, head_dim: 32 }),
            ..DecoderShape::small([128, 320, 4, 4, 2], 4096)
        },
        rope_sections: [3, 3, 2],
        rope,
        vision: TowerShape { depth: 3, hidden: 64, intermediate: 176, heads: 2, grid: 8, parts: &[] },
    }
}

fn rope(theta: f64, sections: [usize; 3]) -> (&'static str, Value) {
    let rope = json!({
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": true,
        "mrope_section": sections,
    });
    ("rope_parameters", rope)
}
