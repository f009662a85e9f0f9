//! Gemma 3 with pictures (arXiv 2503.19786): a SigLIP tower, whose patches are pooled to a fixed
//! number of tokens, and a decoder in which the tokens of a picture attend to one another.

mod config;
mod prompt_text;
mod shape;
mod vision;

use serde_json::Value;

pub use config::Config;
use shape::Shape;

use super::{
    row::{Files, ReadText, Settings, VisionSettings},
    vision_language_model::VisionLanguageModel,
};
use crate::{
    blocks::{ConfigError, DecoderConfig, vision::lay_out_each_tile},
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout},
    processor::VideoProcessor,
    text::PlaceholderTexts,
    workload::Workload,
};

const MODEL_TYPE: &str = "gemma3";

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Gemma3ForConditionalGeneration", MODEL_TYPE)];

    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        Config::read(checkpoint)
    }

    /// The family takes no videos.
    fn video_processor(_: &Checkpoint) -> Option<VideoProcessor> {
        None
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
            token: self.image_token,
            row: self.vision.row(),
            step_text_tokens: 0,
            tile: Some(self.vision.grid()),
        })
    }

    fn write_visuals(&self, rendered: String, visuals: &[MediaGrid]) -> String {
        prompt_text::write(rendered, visuals)
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(prompt_text::PLACEHOLDERS)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        lay_out_each_tile(&tokens, visuals, self.image_token, self.vision.merge)
    }

    fn released_processors(config: &Value) -> Option<Files> {
        (config["model_type"] == MODEL_TYPE).then(|| shape::processors(config))
    }
}

pub type Model = VisionLanguageModel<vision::VisionTower>;
