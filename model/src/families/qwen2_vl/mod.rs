//! Qwen2-VL (arXiv 2409.12191): a vision tower with full attention, followed by a Qwen2 decoder
//! with multimodal rotary positions.

mod config;
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
        vision::{EmbeddingLayout, Placeholders, QWEN_PLACEHOLDERS, VideoPlace, lay_out, released_processor},
    },
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout},
    text::PlaceholderTexts,
    workload::Workload,
};

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Qwen2VLForConditionalGeneration", "qwen2_vl")];

    /// Every kind of work. The encoder sees a video as pictures, so videos add no kind.
    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        Config::read(checkpoint)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn pictures(&self) -> Option<VisionSettings> {
        let (merge, patch, token) = (self.vision.tower.merge(), self.vision.tower.patch(), self.tokens.image);
        let row = EmbeddingLayout::plain(self.decoder.hidden);
        Some(VisionSettings { merge, patch, token, row, step_text_tokens: 0, tile: None })
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(QWEN_PLACEHOLDERS)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        let (merge, video) = (self.vision.tower.merge(), VideoPlace::Counted);
        lay_out(&tokens, visuals, &Placeholders { tokens: self.tokens, merge, video })
    }

    fn released_processors(config: &Value) -> Option<Files> {
        let is_ours = config["model_type"] == Self::ARCHITECTURES[0].1;
        is_ours.then(|| vec![("preprocessor_config.json", released_processor(config).to_string().into_bytes())])
    }
}

pub type Model = VisionLanguageModel<vision::VisionTower>;
