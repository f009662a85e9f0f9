//! The settings of models of this family, for checkpoints whose weights are drawn at random.

use serde_json::{Value, json};

use super::ARCHITECTURES;
use crate::text::byte_level;

/// The family's control tokens. Their ids follow the words', in this order.
const CONTROL: [&str; 14] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
];

/// Turns between their marks, without a system turn that nobody wrote.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\
    {% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
    {% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
    {% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
    {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A model by its numbers alone.
pub struct Shape {
    /// What it is asked for by.
    pub name: &'static str,
    /// Tokens that are text.
    words: usize,
    /// Rows of the embedding, some of which no token uses.
    vocabulary: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    rope_sections: [usize; 3],
    context_tokens: usize,
    vision: VisionShape,
}

struct VisionShape {
    depth: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    full_attention: &'static [usize],
}

/// All of them.
pub const SHAPES: [Shape; 2] = [
    Shape {
        name: "qwen2.5-vl-7b",
        words: 151_643,
        vocabulary: 152_064,
        hidden: 3584,
        intermediate: 18_944,
        layers: 28,
        heads: 28,
        kv_heads: 4,
        rope_sections: [16, 24, 24],
        context_tokens: 128_000,
        vision: VisionShape {
            depth: 32,
            hidden: 1280,
            intermediate: 3420,
            heads: 16,
            full_attention: &[7, 15, 23, 31],
        },
    },
    // Of nobody's model: small enough for a test on any machine.
    Shape {
        name: "qwen2.5-vl-tiny",
        words: 1000,
        vocabulary: 1024,
        hidden: 128,
        intermediate: 320,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        rope_sections: [4, 6, 6],
        context_tokens: 4096,
        vision: VisionShape { depth: 2, hidden: 64, intermediate: 176, heads: 2, full_attention: &[1] },
    },
];

impl Shape {
    /// The files of its checkpoint, but for the weights.
    pub fn files(&self) -> [(&'static str, Vec<u8>); 5] {
        [
            ("config.json", self.config().to_string().into_bytes()),
            ("generation_config.json", self.generation().to_string().into_bytes()),
            ("preprocessor_config.json", processor().to_string().into_bytes()),
            ("tokenizer.json", byte_level::tokenizer(self.words, &CONTROL)),
            ("tokenizer_config.json", json!({ "chat_template": TEMPLATE }).to_string().into_bytes()),
        ]
    }

    /// The id of a control token.
    fn id(&self, token: &str) -> usize {
        self.words + CONTROL.iter().position(|control| *control == token).expect("a token of the list")
    }

    fn config(&self) -> Value {
        let vision = &self.vision;
        json!({
            "architectures": ARCHITECTURES,
            "model_type": "qwen2_5_vl",
            "eos_token_id": self.id("<|im_end|>"),
            "image_token_id": self.id("<|image_pad|>"),
            "video_token_id": self.id("<|video_pad|>"),
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context_tokens,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "rope_scaling": { "type": "mrope", "mrope_section": self.rope_sections },
            "tie_word_embeddings": false,
            "use_sliding_window": false,
            "vocab_size": self.vocabulary,
            "vision_config": {
                "depth": vision.depth,
                "hidden_act": "silu",
                "hidden_size": vision.hidden,
                "intermediate_size": vision.intermediate,
                "num_heads": vision.heads,
                "in_chans": 3,
                "out_hidden_size": self.hidden,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "tokens_per_second": 2,
                "window_size": 112,
                "fullatt_block_indexes": vision.full_attention,
            },
        })
    }

    fn generation(&self) -> Value {
        json!({ "eos_token_id": [self.id("<|im_end|>"), self.id("<|endoftext|>")], "do_sample": false })
    }
}

/// As the released checkpoints have it.
fn processor() -> Value {
    json!({
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    })
}
