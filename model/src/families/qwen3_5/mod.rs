//! Qwen3.5, 3.6 and 3.8 with pictures, with or without experts: Qwen3-VL's vision tower without
//! DeepStack, followed by a hybrid decoder, in which three of four layers are gated delta nets.

mod shape;

use serde_json::{Map, Value};

use super::{
    deepstack::{self, DeepstackFamily, Shape},
    vision_language_model::VisionLanguageModel,
};
use crate::{
    blocks::{
        ConfigError, DecoderConfig, hybrid,
        vision::{DeepstackTower, released_video_processors},
    },
    checkpoint::{GgufArchitecture, GgufLayers, GgufVision},
};

/// Describes a GGUF architecture. The first pair is the class and the `model_type` of the model
/// without its vision encoder. `whole` is the class and the `model_type` of the model with its
/// vision encoder.
const fn gguf(
    name: &'static str,
    (class, model_type): (&'static str, &'static str),
    whole: (&'static str, &'static str),
    has_experts: bool,
) -> GgufArchitecture {
    let layers = GgufLayers::Hybrid { has_experts };
    let vision = GgufVision {
        class: whole.0,
        model_type: whole.1,
        projector: "qwen3vl_merger",
        processors: released_video_processors,
    };
    GgufArchitecture { name, class, model_type, layers, vision: Some(vision) }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Family;

impl DeepstackFamily for Family {
    const ARCHITECTURES: &'static [(&'static str, &'static str); 2] = &shape::ARCHITECTURES;

    const GGUF: &'static [GgufArchitecture] = &[
        gguf("qwen35", ("Qwen3_5ForCausalLM", "qwen3_5_text"), shape::ARCHITECTURES[0], false),
        gguf("qwen35moe", ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"), shape::ARCHITECTURES[1], true),
    ];

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    const DEEPSTACK_LAYERS: &'static [usize] = &[];

    /// From `Qwen3_5Config` of transformers 5.17.
    const PLACEHOLDERS: [u32; 2] = [248_056, 248_057];

    fn read_decoder(text: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError> {
        hybrid::read("text_config.", text, is_mixed)
    }
}

pub type Config = deepstack::Config<Family>;

pub type Model = VisionLanguageModel<DeepstackTower>;
