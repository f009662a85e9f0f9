//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json`, `preprocessor_config.json` and
//! `video_preprocessor_config.json` of Qwen/Qwen3-VL-*-Instruct on huggingface.co (arXiv
//! 2511.21631), as quoted by secondary sources.

use serde_json::{Value, json};

use super::config::{MIXED, MIXED_CLASS};
use crate::blocks::{
    decoder_shape::{DecoderShape, MixtureShape},
    vision::released_video_processors,
};
use crate::families::{Files, ReleasedShape};

/// Sizes of a model, without its weights.
pub struct Shape {
    name: &'static str,
    decoder: DecoderShape,
    rope_sections: [usize; 3],
    vision: VisionShape,
}

struct VisionShape {
    depth: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    grid: usize,
    parts: [usize; 3],
}

const SMALL_TOWER: VisionShape =
    VisionShape { depth: 24, hidden: 1024, intermediate: 4096, heads: 16, grid: 48, parts: [5, 11, 17] };
const LARGE_TOWER: VisionShape =
    VisionShape { depth: 27, hidden: 1152, intermediate: 4304, heads: 16, grid: 48, parts: [8, 16, 24] };

const fn released(name: &'static str, sizes: [usize; 5], is_tied: bool, vision: VisionShape) -> Shape {
    let decoder = DecoderShape::small(sizes, 262_144);
    let decoder = DecoderShape { head_dim: Some(128), rope_theta: 5_000_000.0, is_tied, ..decoder };
    Shape { name, decoder, rope_sections: [24, 20, 20], vision }
}

/// A model in which each layer has 128 experts of width `intermediate`, and each token
/// uses 8 of them.
const fn mixed(name: &'static str, sizes: [usize; 5], intermediate: usize) -> Shape {
    let shape = released(name, sizes, false, LARGE_TOWER);
    let mixture = MixtureShape { experts: 128, top: 8, intermediate, shared: None };
    Shape { decoder: DecoderShape { mixture: Some(mixture), ..shape.decoder }, ..shape }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; whether the head
/// is tied; vision tower.
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

/// A model that was never released, small enough for a test on any machine.
const fn tiny(name: &'static str, mixture: Option<MixtureShape>) -> Shape {
    Shape {
        name,
        decoder: DecoderShape {
            words: 1000,
            vocabulary: 1024,
            head_dim: Some(32),
            is_tied: mixture.is_none(),
            mixture,
            ..DecoderShape::small([128, 320, 3, 4, 2], 4096)
        },
        rope_sections: [6, 5, 5],
        vision: VisionShape { depth: 3, hidden: 64, intermediate: 176, heads: 2, grid: 8, parts: [0, 1, 2] },
    }
}

impl ReleasedShape for Shape {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.decoder
    }

    fn files(&self) -> Files {
        let config = self.config();
        let mut files = vec![("config.json", config.to_string().into_bytes())];
        files.extend(released_video_processors(&config));
        files
    }
}

impl Shape {
    fn config(&self) -> Value {
        let Shape { decoder, vision, .. } = self;
        let mut text = decoder.config();
        let (class, kind) = match decoder.mixture {
            Some(_) => (MIXED_CLASS, MIXED),
            None => ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
        };
        text["model_type"] = format!("{kind}_text").into();
        text["rope_scaling"] =
            json!({ "rope_type": "default", "mrope_interleaved": true, "mrope_section": self.rope_sections });
        json!({
            "architectures": [class],
            "model_type": kind,
            "image_token_id": decoder.id("<|image_pad|>"),
            "video_token_id": decoder.id("<|video_pad|>"),
            "tie_word_embeddings": decoder.is_tied,
            "text_config": text,
            "vision_config": {
                "depth": vision.depth,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": vision.hidden,
                "intermediate_size": vision.intermediate,
                "num_heads": vision.heads,
                "in_channels": 3,
                "out_hidden_size": decoder.hidden,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": vision.grid * vision.grid,
                "deepstack_visual_indexes": vision.parts,
            },
        })
    }
}
