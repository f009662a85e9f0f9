//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from `config.json` of meta-llama/*, HuggingFaceTB/SmolLM2-* and
//! mistralai/Mistral-7B-v0.3 on huggingface.co (arXiv 2407.21783, table 3; arXiv 2502.02737). All
//! shapes use Llama 3's control tokens.

use serde_json::{Value, json};

use crate::blocks::decoder_shape::{DecoderShape, ShapeText};
use crate::families::ReleasedShape;

/// Control tokens and chat template of Llama 3.
const TEXT: ShapeText = ShapeText {
    control: &[
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ],
    template: "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n\
        {{ message['content'] | trim }}<|eot_id|>{% endfor %}\
        {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ends: &["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
};

#[derive(Clone, Copy)]
enum Maker {
    /// Meta. The number is the factor of Llama 3.1's RoPE scaling, for an original context of 8,192
    /// tokens; 1 means no scaling.
    Llama(u32),
    SmolLm,
    Mistral,
}

/// Sizes of a model, without its weights.
pub struct Shape {
    name: &'static str,
    maker: Maker,
    decoder: DecoderShape,
}

const fn released(name: &'static str, maker: Maker, sizes: [usize; 5], is_tied: bool) -> Shape {
    let (vocabulary, rope_theta, context_tokens) = match maker {
        Maker::Llama(1) => (128_256, 500_000.0, 8192),
        Maker::Llama(_) => (128_256, 500_000.0, 131_072),
        Maker::SmolLm => (49_152, 100_000.0, 8192),
        Maker::Mistral => (32_768, 1_000_000.0, 32_768),
    };
    let decoder = DecoderShape::small(sizes, context_tokens);
    let words = vocabulary - 256;
    let decoder = DecoderShape { text: TEXT, words, vocabulary, rope_theta, norm_epsilon: 1e-5, is_tied, ..decoder };
    Shape { name, maker, decoder }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads; whether the output
/// projection is tied to the embedding.
pub const SHAPES: [Shape; 11] = [
    released("llama-3-8b", Maker::Llama(1), [4096, 14_336, 32, 32, 8], false),
    released("llama-3-70b", Maker::Llama(1), [8192, 28_672, 80, 64, 8], false),
    released("llama-3.1-8b", Maker::Llama(8), [4096, 14_336, 32, 32, 8], false),
    released("llama-3.1-70b", Maker::Llama(8), [8192, 28_672, 80, 64, 8], false),
    released("llama-3.2-1b", Maker::Llama(32), [2048, 8192, 16, 32, 8], true),
    released("llama-3.2-3b", Maker::Llama(32), [3072, 8192, 28, 24, 8], true),
    released("llama-3.3-70b", Maker::Llama(8), [8192, 28_672, 80, 64, 8], false),
    released("smollm2-135m", Maker::SmolLm, [576, 1536, 30, 9, 3], true),
    released("smollm2-360m", Maker::SmolLm, [960, 2560, 32, 15, 5], true),
    released("smollm2-1.7b", Maker::SmolLm, [2048, 8192, 24, 32, 32], true),
    released("mistral-7b-v0.3", Maker::Mistral, [4096, 14_336, 32, 32, 8], false),
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
        let (architecture, model_type) = match self.maker {
            Maker::Mistral => ("MistralForCausalLM", "mistral"),
            _ => ("LlamaForCausalLM", "llama"),
        };
        config["architectures"] = [architecture].into();
        config["model_type"] = model_type.into();
        config["sliding_window"] = Value::Null;
        if let Maker::Llama(factor @ 2..) = self.maker {
            config["rope_scaling"] = json!({
                "rope_type": "llama3",
                "factor": f64::from(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            });
        }
        config
    }
}
