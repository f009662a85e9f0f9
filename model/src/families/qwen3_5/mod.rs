//! Qwen3.5, 3.6 and 3.8 with pictures, with or without experts: Qwen3-VL's vision tower without
//! DeepStack, followed by a hybrid decoder, in which three of four layers are gated delta nets.

mod shape;

use serde_json::{Map, Value};

use super::{
    deepstack::{self, DeepstackFamily, Shape},
    vision_language_model::VisionLanguageModel,
};
use crate::blocks::{ConfigError, DecoderConfig, hybrid, vision::DeepstackTower};

#[derive(Clone, Debug, PartialEq)]
pub struct Family;

impl DeepstackFamily for Family {
    const ARCHITECTURES: &'static [(&'static str, &'static str); 2] = &shape::ARCHITECTURES;

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
