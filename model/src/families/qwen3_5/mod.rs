//! Qwen3.5, 3.6 and 3.8 with pictures, with or without experts: Qwen3-VL's vision tower without
//! DeepStack, followed by a hybrid decoder, in which three of four layers are gated delta nets.

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
    checkpoint::{Checkpoint, GgufArchitecture, GgufLayers, GgufVision},
    flow::{LayoutError, MediaGrid, PromptLayout, ResizedImage},
    processor::VideoProcessor,
    text::PlaceholderTexts,
    weights::{WeightError, WeightMap},
    workload::Workload,
};

/// A GGUF architecture. Each pair has the class and the `model_type`, of the model without its
/// vision encoder and of the whole model.
const fn gguf(
    name: &'static str,
    [class, model_type]: [&'static str; 2],
    whole: [&'static str; 2],
    has_experts: bool,
) -> GgufArchitecture {
    let layers = GgufLayers::Hybrid { has_experts };
    let vision = GgufVision {
        class: whole[0],
        model_type: whole[1],
        projector: "qwen3vl_merger",
        processors: released_video_processors,
    };
    GgufArchitecture { name, class, model_type, layers, vision: Some(vision) }
}

impl Settings for Config {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] =
        &[("Qwen3_5ForConditionalGeneration", "qwen3_5"), (config::MIXED_CLASS, config::MIXED)];

    const GGUF: &'static [GgufArchitecture] = &[
        gguf("qwen35", ["Qwen3_5ForCausalLM", "qwen3_5_text"], ["Qwen3_5ForConditionalGeneration", "qwen3_5"], false),
        gguf("qwen35moe", ["Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"], [config::MIXED_CLASS, config::MIXED], true),
    ];

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
