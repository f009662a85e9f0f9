//! The settings of models of this family, for checkpoints whose weights are drawn at random.
//!
//! The numbers are those of `config.json` of Qwen/Qwen2.5-*-Instruct and Qwen/QwQ-32B on huggingface.co (arXiv 2412.15115,
//! table 1). Base models of 7B and more say 131,072 tokens of context, and QwQ-32B did before May 2025 (QwenLM/QwQ#26).

use super::ARCHITECTURES;
use crate::blocks::decoder_shape::DecoderShape;

/// A model by its numbers alone.
pub struct Shape {
    /// What it is asked for by.
    pub name: &'static str,
    decoder: DecoderShape,
}

/// All of them: width, width of the MLP, layers, query heads, heads of keys and values; tokens of context.
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

impl Shape {
    /// The files of its checkpoint, but for the weights.
    pub fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let mut config = self.decoder.config();
        config["architectures"] = ARCHITECTURES.into();
        config["model_type"] = "qwen2".into();
        let mut files = vec![("config.json", config.to_string().into_bytes())];
        files.extend(self.decoder.text_files());
        files
    }
}
