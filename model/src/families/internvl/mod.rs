//! InternVL 3 and 3.5 (arXiv 2504.10479, 2508.18265). InternViT encodes a picture as tiles of one
//! size. The decoder is a text model of another family. Released checkpoints and transformers'
//! conversions of them are supported.

mod config;
mod names;
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
    blocks::{ConfigError, DecoderConfig, vision::lay_out_in_line},
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout},
    text::PlaceholderTexts,
    workload::Workload,
};

/// The architectures of transformers' conversion and of the released layout.
const ARCHITECTURES: [(&str, &str); 2] =
    [("InternVLForConditionalGeneration", "internvl"), ("InternVLChatModel", "internvl_chat")];

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &ARCHITECTURES;

    /// All workloads. The encoder processes a video as pictures, so videos add no workload.
    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, text: ReadText) -> Result<Self, ConfigError> {
        Config::read(checkpoint, text)
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
            step_text_tokens: prompt_text::STEP_TOKENS,
            tile: Some(self.vision.tile()),
        })
    }

    fn write_visuals(&self, rendered: String, visuals: &[MediaGrid]) -> String {
        prompt_text::write(rendered, visuals)
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(prompt_text::PLACEHOLDERS)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        lay_out_in_line(&tokens, visuals, self.image_token, self.vision.merge)
    }

    fn released_processors(config: &Value) -> Option<Files> {
        ARCHITECTURES.iter().any(|(_, kind)| config["model_type"] == *kind).then(|| shape::processors(config))
    }
}

pub type Model = VisionLanguageModel<vision::VisionTower>;
