//! Qwen3-VL without experts (arXiv 2511.21631): a vision tower of full attention with a learned grid of positions,
//! before a Qwen3 decoder with interleaved multimodal rotary positions. What the tower computed on the way is added
//! behind the decoder's first layers (DeepStack, arXiv 2406.04334).

mod config;
mod shape;
mod video_text;
mod vision;

use bursar_kernels::{Backend, KernelError, Scope, Tensor};
use serde_json::Value;

pub use config::Config;
use shape::Shape;
use vision::VisionTower;

use super::row::{Files, PictureSettings, ReadText, Settings, Weights};
use crate::{
    Depth,
    blocks::{
        ConfigError,
        decoder::{Decoder, DecoderConfig},
        vision::{PackedPictures, Placeholders, VideoPlace, lay_out},
    },
    checkpoint::Checkpoint,
    flow::{LayoutError, PromptLayout, ResizedImage, VisualGrid},
    processor::{ImageProcessor, VideoProcessor},
    weights::{WeightError, WeightMap},
    workload::Workload,
};

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("Qwen3VLForConditionalGeneration", "qwen3_vl")];

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
        let (merge, patch, row) = (self.vision.merge(), self.vision.patch(), self.vision.row());
        let step_text_tokens = video_text::STEP_TOKENS;
        Some(PictureSettings { merge, patch, token: self.tokens.image, row, step_text_tokens, tile: None })
    }

    fn write_visuals(&self, rendered: String, visuals: &[VisualGrid]) -> String {
        video_text::write(&rendered, visuals, self.vision.temporal_patch_size)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[VisualGrid]) -> Result<PromptLayout, LayoutError> {
        let (merge, video) = (self.vision.merge(), VideoPlace::Written);
        lay_out(&tokens, visuals, &Placeholders { tokens: self.tokens, merge, video })
    }

    fn released_processors(config: &Value) -> Option<Files> {
        (config["model_type"] == Self::ARCHITECTURES[0].1).then(|| shape::processors(config))
    }
}

/// The family's weights.
pub struct Model {
    /// Turns pictures into rows of the vision cache.
    vision: VisionTower,
    /// Turns these and text into logits.
    decoder: Decoder,
}

impl Weights<Config> for Model {
    type Batch = PackedPictures;

    fn claim(config: Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let vision = VisionTower::claim(config.vision, "model.visual", map)?;
        Ok(Model { vision, decoder: Decoder::claim(config.decoder, "model.language_model", map)? })
    }

    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PackedPictures {
        let config = self.vision.config();
        PackedPictures::of(config.patch(), config.merge(), pictures)
    }

    fn patches(batch: &PackedPictures) -> usize {
        batch.patches()
    }

    fn embeddings(batch: &PackedPictures) -> usize {
        batch.embeddings()
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedPictures,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.vision.encode(scope, batch, cache, depth)
    }
}
