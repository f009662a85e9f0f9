//! Qwen2.5-VL (arXiv 2502.13923): a vision tower of windowed and full attention before a Qwen2.5 decoder with
//! multimodal rotary positions.

mod config;
mod shape;
mod vision;
mod windows;

use bursar_kernels::{Backend, KernelError, Scope, Tensor};
use serde_json::Value;

pub use config::Config;
use shape::Shape;
use vision::{PictureBatch, VisionTower};

use super::row::{Files, PictureSettings, ReadText, Settings, Weights};
use crate::{
    Depth,
    blocks::{
        ConfigError,
        decoder::{Decoder, DecoderConfig},
        vision::{PictureRow, Placeholders, VideoPlace, lay_out},
    },
    checkpoint::Checkpoint,
    flow::{LayoutError, PromptLayout, ResizedImage, VisualGrid},
    processor::{ImageProcessor, VideoProcessor},
    weights::{WeightError, WeightMap},
    workload::Workload,
};

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")];

    /// Every kind of work. The encoder sees a video as pictures, so videos add none.
    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = &shape::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let processor = checkpoint.image_processor.as_ref().map(ImageProcessor::config);
        let videos = checkpoint.video_processor.as_ref().map(VideoProcessor::config);
        Config::read(&checkpoint.config, processor, videos)
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn pictures(&self) -> Option<PictureSettings> {
        let (merge, patch, token) = (self.vision.merge(), self.vision.patch(), self.tokens.image);
        let row = PictureRow::plain(self.decoder.hidden);
        Some(PictureSettings { merge, patch, token, row, step_text_tokens: 0, tile: None })
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[VisualGrid]) -> Result<PromptLayout, LayoutError> {
        let (frames, tokens_per_second) = (self.vision.temporal_patch_size, self.vision.tokens_per_second);
        let video = VideoPlace::Timed { frames, tokens_per_second };
        lay_out(&tokens, visuals, &Placeholders { tokens: self.tokens, merge: self.vision.merge(), video })
    }

    fn released_processors(config: &Value) -> Option<Files> {
        let is_ours = config["model_type"] == Self::ARCHITECTURES[0].1;
        is_ours.then(|| vec![("preprocessor_config.json", shape::processor(config).to_string().into_bytes())])
    }
}

/// The family's weights.
pub struct Model {
    /// Turns pictures into embeddings.
    vision: VisionTower,
    /// Turns embeddings and text into logits.
    decoder: Decoder,
}

impl Weights<Config> for Model {
    type Batch = PictureBatch;

    fn claim(config: Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        // Tensor names changed with transformers 4.52. As transformers does, this reads both (5.17,
        // `conversion_mapping.py`, under `Qwen2VLForConditionalGeneration`).
        let tower = if map.has("model.visual.patch_embed.proj.weight") { "model.visual" } else { "visual" };
        let text = if map.has("model.language_model.norm.weight") { "model.language_model" } else { "model" };
        let vision = VisionTower::claim(config.vision, tower, map)?;
        Ok(Model { vision, decoder: Decoder::claim(config.decoder, text, map)? })
    }

    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PictureBatch {
        self.vision.pack(pictures)
    }

    fn patches(batch: &PictureBatch) -> usize {
        batch.patches()
    }

    fn embeddings(batch: &PictureBatch) -> usize {
        batch.embeddings()
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.vision.encode(scope, batch, cache, depth)
    }
}
