//! Gemma 4 with pictures: a vision transformer, whose patches are pooled to tokens, and a decoder.
//! In the larger models, picture tokens attend to the whole picture in sliding-window layers. Each
//! frame of a video is encoded as a picture. Audio is not supported.

mod config;
mod layer;
mod shape;
mod vision;

use serde_json::Value;

pub use config::Config;
use shape::Shape;

use super::{
    gemma4_decoder::processors,
    gemma4_prompt,
    row::{Files, ReadText, Settings, VisionSettings},
    vision_language_model::VisionLanguageModel,
};
use crate::{
    blocks::{ConfigError, DecoderConfig},
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout},
    text::PlaceholderTexts,
    workload::Workload,
};

const MODEL_TYPE: &str = "gemma4";

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Gemma4ForConditionalGeneration", MODEL_TYPE)];

    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        Config::read(checkpoint)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.decoder
    }

    fn pictures(&self) -> Option<VisionSettings> {
        Some(VisionSettings {
            merge: self.vision.merge,
            patch: self.vision.patch(),
            token: self.tokens.placeholders.image,
            row: self.vision.row(),
            step_text_tokens: gemma4_prompt::STEP_TOKENS,
            tile: None,
        })
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(gemma4_prompt::PLACEHOLDERS)
    }

    fn write_visuals(&self, rendered: String, visuals: &[MediaGrid]) -> String {
        gemma4_prompt::write_videos(&rendered, visuals)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        self.tokens.lay_out(tokens, visuals, self.vision.merge)
    }

    fn released_processors(config: &Value) -> Option<Files> {
        (config["model_type"] == MODEL_TYPE).then(|| processors("Gemma4"))
    }
}

pub type Model = VisionLanguageModel<vision::VisionTower>;
