//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of Qwen/Qwen2.5-*-Instruct and Qwen/QwQ-32B on huggingface.co
//! (arXiv 2412.15115, table 1). Base models from 7B on have 131,072 tokens of context, as QwQ-32B
//! did before May 2025 (QwenLM/QwQ#26).

use serde_json::Value;

use crate::blocks::decoder_shape::DecoderShape;
use crate::families::ReleasedShape;

/// Sizes of a model, without its weights.
pub struct Shape {
    name: &'static str,
    decoder: DecoderShape,
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; context tokens.
pub const SHAPES: [Shape; 8] = [
    Shape { name: "qwen2.5-0.5b", decoder: DecoderShape::small([896, 4864, 24, 14, 2], 32_768) },
    Shape { name: "qwen2.5-1.5b", decoder: DecoderShape::small([1536, 8960, 28, 12, 2], 32_768) },
    Shape { name: "qwen2.5-3b", decoder: DecoderShape::small([2048, 11_008, 36, 16, 2], 32_768) },
    Shape { name: "qwen2.5-7b", decoder: DecoderShape::large([3584, 18_944, 28, 28, 4], 32_768) },
    Shape { name: "qwen2.5-14b", decoder: DecoderShape::large([5120, 13_824, 48, 40, 8], 32_768) },
    Shape { name: "qwen2.5-32b", decoder: DecoderShape::large([5120, 27_648, 64, 40, 8], 32_768) },
    Shape { name: "qwen2.5-72b", decoder: DecoderShape::large([8192, 29_568, 80, 64, 8], 32_768) },
    Shape { name: "qwq-32b", decoder: DecoderShape::large([5120, 27_648, 64, 40, 8], 40_960) },
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
        config["architectures"] = ["Qwen2ForCausalLM"].into();
        config["model_type"] = "qwen2".into();
        config
    }
}
