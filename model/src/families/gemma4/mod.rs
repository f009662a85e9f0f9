//! Gemma 4 with pictures: a vision transformer, whose patches are pooled to tokens, and a decoder.
//! In the larger models, picture tokens attend to the whole picture in sliding-window layers. Each
//! frame of a video is encoded as a picture. Audio is not supported.

mod config;
mod layer;
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
    blocks::{
        ConfigError, DecoderConfig,
        vision::{Placeholders, VideoPlace, lay_out},
    },
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
            token: self.tokens.image,
            row: self.vision.row(),
            step_text_tokens: prompt_text::STEP_TOKENS,
            tile: None,
        })
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(prompt_text::PLACEHOLDERS)
    }

    fn write_visuals(&self, rendered: String, visuals: &[MediaGrid]) -> String {
        prompt_text::write(&rendered, visuals)
    }

    /// Encloses each picture and frame in the tokens for a picture's beginning and end, as
    /// `processing_gemma4.py` of transformers 5.17 does.
    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        let [begin, end] = self.picture_ends;
        let enclosed = |token: u32| {
            let is_picture = token == self.tokens.image || Some(token) == self.tokens.video;
            let ends = is_picture.then_some((begin, end)).unzip();
            ends.0.into_iter().chain([token]).chain(ends.1)
        };
        let tokens: Vec<_> = tokens.into_iter().flat_map(enclosed).collect();
        let (merge, video) = (self.vision.merge, VideoPlace::Written);
        let mut layout = lay_out(&tokens, visuals, &Placeholders { tokens: self.tokens, merge, video })?;
        layout.number_in_line();
        Ok(layout)
    }

    fn released_processors(config: &Value) -> Option<Files> {
        (config["model_type"] == MODEL_TYPE).then(shape::processors)
    }
}

pub type Model = VisionLanguageModel<vision::VisionTower>;
