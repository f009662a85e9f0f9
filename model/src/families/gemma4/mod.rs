//! Gemma 4 with pictures: a vision transformer, whose patches are pooled to tokens, and a decoder.
//! In the larger models, picture tokens attend to the whole picture in sliding-window layers. Audio
//! and videos are not supported.

mod config;
mod layer;
mod shape;
mod vision;

use serde_json::Value;

pub use config::Config;
use shape::{IMAGE, Shape};

use super::{
    row::{Files, ReadText, Settings, VisionSettings},
    vision_language_model::VisionLanguageModel,
};
use crate::{
    blocks::{ConfigError, DecoderConfig, vision::lay_out_in_line},
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout},
    processor::VideoProcessor,
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
            tile: None,
        })
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(PlaceholderTexts { image: IMAGE, video: None, before: "", after: "" })
    }

    /// Encloses each picture in the tokens for its beginning and its end, as `processing_gemma4.py`
    /// of transformers 5.17 does.
    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        let [begin, end] = self.picture_ends;
        let enclosed = |token: u32| {
            let ends = (token == self.image_token).then_some((begin, end)).unzip();
            ends.0.into_iter().chain([token]).chain(ends.1)
        };
        let tokens: Vec<_> = tokens.into_iter().flat_map(enclosed).collect();
        lay_out_in_line(&tokens, visuals, self.image_token, self.vision.merge)
    }

    fn released_processors(config: &Value) -> Option<Files> {
        (config["model_type"] == MODEL_TYPE).then(shape::processors)
    }
}

pub type Model = VisionLanguageModel<vision::VisionTower>;
