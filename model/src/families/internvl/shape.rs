//! Settings of this family's models, for checkpoints with random weights or without weights.
//!
//! The numbers are from arXiv 2504.10479 (table 1) and 2508.18265 (table 1), and the numbers of the
//! text models are from their releases. No output projection is tied to the embedding: the
//! parameter counts of the papers include both.

use serde_json::{Value, json};

use crate::blocks::decoder_shape::{DecoderShape, ShapeText};
use crate::families::{Files, ReleasedShape};

/// Sizes of a model, without its weights.
pub struct Shape {
    name: &'static str,
    text_type: &'static str,
    decoder: DecoderShape,
    vision: VisionShape,
}

#[derive(Clone, Copy)]
struct VisionShape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    image: usize,
    is_large: bool, // InternViT-6B: RMS norms, and no biases of queries, keys and values
}

/// InternViT-300M-448px-V2.5.
const SMALL_TOWER: VisionShape =
    VisionShape { layers: 24, hidden: 1024, intermediate: 4096, heads: 16, image: 448, is_large: false };
/// InternViT-6B-448px-V2.5.
const LARGE_TOWER: VisionShape =
    VisionShape { layers: 45, hidden: 3200, intermediate: 12_800, heads: 25, image: 448, is_large: true };

const TEXT: ShapeText = ShapeText {
    control: &["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    template: "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\
        {% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
        {% if part['type'] == 'image' %}<IMG_CONTEXT>\n{% elif part['type'] == 'video' %}<video>\n\
        {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ends: &["<|im_end|>", "<|endoftext|>"],
};

/// A model of version 3, based on Qwen2.5.
const fn three(name: &'static str, sizes: [usize; 5], vision: VisionShape) -> Shape {
    let decoder = DecoderShape::small(sizes, 32_768);
    Shape { name, text_type: "qwen2", decoder: DecoderShape { vocabulary: 151_674, ..untied(decoder) }, vision }
}

/// A model of version 3.5, based on Qwen3.
const fn three_and_a_half(name: &'static str, sizes: [usize; 5], vision: VisionShape) -> Shape {
    let decoder = DecoderShape { head_dim: Some(128), ..DecoderShape::small(sizes, 40_960) };
    Shape { name, text_type: "qwen3", decoder: untied(decoder), vision }
}

const fn untied(decoder: DecoderShape) -> DecoderShape {
    DecoderShape { text: TEXT, is_tied: false, ..decoder }
}

/// Columns: hidden width, MLP width, layers, query heads, key and value heads of the
/// text model; vision tower.
pub const SHAPES: [Shape; 13] = [
    three("internvl3-1b", [896, 4864, 24, 14, 2], SMALL_TOWER),
    three("internvl3-2b", [1536, 8960, 28, 12, 2], SMALL_TOWER),
    three("internvl3-8b", [3584, 18_944, 28, 28, 4], SMALL_TOWER),
    three("internvl3-14b", [5120, 13_824, 48, 40, 8], SMALL_TOWER),
    three("internvl3-38b", [5120, 27_648, 64, 40, 8], LARGE_TOWER),
    three("internvl3-78b", [8192, 29_568, 80, 64, 8], LARGE_TOWER),
    three_and_a_half("internvl3.5-1b", [1024, 3072, 28, 16, 8], SMALL_TOWER),
    three_and_a_half("internvl3.5-2b", [2048, 6144, 28, 16, 8], SMALL_TOWER),
    three_and_a_half("internvl3.5-4b", [2560, 9728, 36, 32, 8], SMALL_TOWER),
    three_and_a_half("internvl3.5-8b", [4096, 12_288, 36, 32, 8], SMALL_TOWER),
    three_and_a_half("internvl3.5-14b", [5120, 17_408, 40, 40, 8], SMALL_TOWER),
    three_and_a_half("internvl3.5-38b", [5120, 25_600, 64, 64, 8], LARGE_TOWER),
    // Not a released model. It is small enough for a test on any machine.
    Shape {
        name: "internvl-tiny",
        text_type: "qwen2",
        decoder: DecoderShape {
            words: 1000,
            vocabulary: 1024,
            ..untied(DecoderShape::small([128, 320, 3, 4, 2], 4096))
        },
        vision: VisionShape { layers: 3, hidden: 64, intermediate: 176, heads: 2, image: 56, is_large: false },
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
        let Shape { decoder, vision, .. } = self;
        let mut text = decoder.config();
        text["model_type"] = self.text_type.into();
        json!({
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": decoder.id("<IMG_CONTEXT>"),
            "tie_word_embeddings": decoder.is_tied,
            "downsample_ratio": 0.5,
            "text_config": text,
            "vision_config": {
                "num_hidden_layers": vision.layers,
                "hidden_size": vision.hidden,
                "intermediate_size": vision.intermediate,
                "num_attention_heads": vision.heads,
                "image_size": [vision.image, vision.image],
                "patch_size": [14, 14],
                "attention_bias": !vision.is_large,
                "use_qk_norm": vision.is_large,
                "norm_type": if vision.is_large { "rms_norm" } else { "layer_norm" },
            },
        })
    }
}

/// Settings files of the processors that belong to this `config.json`: the files of transformers'
/// conversions, or the single file of the releases, whose tile settings are in `config.json`.
pub fn processors(config: &Value) -> Files {
    let side = &config["vision_config"]["image_size"];
    let side = side.as_u64().or(side[0].as_u64()).unwrap_or(448);
    let settings = |kind: &str, name: &str, size: Value| {
        let settings = json!({
            kind: name,
            "size": size,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        });
        settings.to_string().into_bytes()
    };
    if config.get("llm_config").is_some() {
        let released = settings("feature_extractor_type", "CLIPFeatureExtractor", side.into());
        return vec![("preprocessor_config.json", released)];
    }
    let size = json!({ "height": side, "width": side });
    vec![
        ("preprocessor_config.json", settings("image_processor_type", "GotOcr2ImageProcessorFast", size.clone())),
        ("video_preprocessor_config.json", settings("video_processor_type", "InternVLVideoProcessor", size)),
    ]
}
