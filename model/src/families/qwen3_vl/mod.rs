//! Qwen3-VL (arXiv 2511.21631), with or without experts: a vision tower with full attention
//! and a learned grid of positions, followed by a Qwen3 decoder with interleaved multimodal
//! rotary positions. Intermediate outputs of the tower are added after the decoder's first
//! layers (DeepStack, arXiv 2406.04334).

mod config;
mod shape;

use bursar_kernels::{Backend, KernelError, Scope, Tensor};
use serde_json::Value;

pub use config::Config;
use shape::Shape;

use super::{
    row::{Files, ReadText, Settings, VisionSettings},
    vision_language_model::{Tower, VisionLanguageModel},
};
use crate::{
    Depth,
    blocks::{
        ConfigError, DecoderConfig,
        decoder::Decoder,
        vision::{
            DeepstackTower, PackedImages, Placeholders, QWEN_PLACEHOLDERS, VideoPlace, lay_out,
            released_video_processors, video_text,
        },
    },
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout, ResizedImage},
    processor::VideoProcessor,
    text::PlaceholderTexts,
    weights::{WeightError, WeightMap},
    workload::Workload,
};

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Qwen3VLForConditionalGeneration", "qwen3_vl"), (config::MIXED_CLASS, config::MIXED)];

    /// Every kind of work. The encoder sees a video as pictures, so videos add no kind.
    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        Config::read(checkpoint)
    }

    /// If there are no video settings, the picture settings apply, but their pixel limits apply to
    /// all frames together (transformers 5.17, `get_video_processor_dict`).
    fn video_processor(checkpoint: &Checkpoint) -> Option<VideoProcessor> {
        let own = checkpoint.own_video_processor().cloned();
        own.or_else(|| Some(checkpoint.video_processor.as_ref()?.counting_all_frames()))
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn pictures(&self) -> Option<VisionSettings> {
        let (merge, patch, row) = (self.vision.tower.merge(), self.vision.tower.patch(), self.vision.row());
        let step_text_tokens = video_text::STEP_TOKENS;
        Some(VisionSettings { merge, patch, token: self.tokens.image, row, step_text_tokens, tile: None })
    }

    fn write_visuals(&self, rendered: String, visuals: &[MediaGrid]) -> String {
        video_text::write(&rendered, visuals, self.vision.tower.temporal_patch_size)
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(QWEN_PLACEHOLDERS)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        let (merge, video) = (self.vision.tower.merge(), VideoPlace::Written);
        lay_out(&tokens, visuals, &Placeholders { tokens: self.tokens, merge, video })
    }

    fn released_processors(config: &Value) -> Option<Files> {
        let is_ours = Self::ARCHITECTURES.iter().any(|(_, kind)| config["model_type"] == *kind);
        is_ours.then(|| released_video_processors(config))
    }
}

impl Tower<Config> for DeepstackTower {
    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let tower = DeepstackTower::claim(config.vision, "model.visual", map)?;
        Ok((tower, Decoder::claim(config.decoder, "model.language_model", map)?))
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PackedImages {
        self.pack(pictures)
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedImages,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.encode(scope, batch, cache, depth)
    }
}

pub type Model = VisionLanguageModel<DeepstackTower>;
