//! Families with the vision tower of Qwen3-VL (arXiv 2511.21631), with or without experts. Each
//! family provides the names and sizes of its models, and the function that reads its decoder's
//! settings.

use std::{fmt::Debug, marker::PhantomData};

use bursar_kernels::{Backend, KernelError, Scope, Tensor};
use serde_json::{Map, Value, json};

use super::{
    row::{Files, ReadText, ReleasedShape, Settings, VisionSettings},
    vision_language_model::Tower,
};
use crate::{
    Depth,
    blocks::{
        ConfigError, DecoderConfig, config_keys,
        decoder::Decoder,
        decoder_shape::DecoderShape,
        vision::{
            DeepstackConfig, DeepstackTower, PackedImages, PlaceholderTokens, Placeholders, QWEN_PLACEHOLDERS,
            TowerInput, VideoPlace, lay_out, released_video_processors, video_text,
        },
    },
    checkpoint::{Checkpoint, GgufArchitecture},
    flow::{LayoutError, MediaGrid, PromptLayout, ResizedImage},
    processor::VideoProcessor,
    text::PlaceholderTexts,
    weights::{WeightError, WeightMap},
    workload::Workload,
};

pub trait DeepstackFamily: Clone + Debug + PartialEq + 'static {
    /// Architecture and `model_type` of the dense models, then of the mixture-of-experts models.
    const ARCHITECTURES: &'static [(&'static str, &'static str); 2];

    /// Architectures in the GGUF files of the family.
    const GGUF: &'static [GgufArchitecture] = &[];

    const SHAPES: &'static [Shape];

    /// Default layers of the tower whose output is added after the decoder's first layers.
    const DEEPSTACK_LAYERS: &'static [usize];

    /// Default ids of the placeholders of pictures and videos.
    const PLACEHOLDERS: [u32; 2] = PlaceholderTokens::DEFAULTS;

    /// Reads `text_config`.
    fn read_decoder(text: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError>;
}

/// The configuration of the family `F`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config<F> {
    pub decoder: DecoderConfig,
    pub vision: DeepstackConfig,
    tokens: PlaceholderTokens,
    family: PhantomData<F>,
}

impl<F: DeepstackFamily> Settings for Config<F> {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = F::ARCHITECTURES;

    const GGUF: &'static [GgufArchitecture] = F::GGUF;

    /// All workloads. The encoder processes a video as pictures, so videos add no workload.
    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape;

    const SHAPES: &'static [Shape] = F::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        config_keys::refuse_unknown("", config)?;
        let [_, (class, kind)] = *F::ARCHITECTURES;
        let is_mixed = checkpoint.model_type() == Some(kind) || checkpoint.architectures().any(|name| name == class);
        let none = Map::new();
        let text = config_keys::part(config, "text_config")?.unwrap_or(&none);
        let mut decoder = F::read_decoder(text, is_mixed)?;
        // The key may be in `text_config`, at the top level, or in both with the same value.
        decoder.tied_embeddings = config_keys::tied_embeddings(config, text)?;
        let vision = config_keys::part(config, "vision_config")?.unwrap_or(&none);
        let vision = DeepstackConfig::read(vision, F::DEEPSTACK_LAYERS)?;
        vision.check(&decoder)?;
        let (images, videos) = (checkpoint.image_processor.as_ref(), Self::video_processor(checkpoint));
        TowerInput { counts_whole_videos: true, ..vision.tower.input() }.check(images, videos.as_ref())?;
        let tokens = PlaceholderTokens::read_over(F::PLACEHOLDERS, config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens, family: PhantomData })
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

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.decoder
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
        let is_ours = F::ARCHITECTURES.iter().any(|(_, kind)| config["model_type"] == *kind);
        is_ours.then(|| released_video_processors(config))
    }
}

impl<F: DeepstackFamily> Tower<Config<F>> for DeepstackTower {
    type Batch = PackedImages;

    fn claim_model(config: Config<F>, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
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

/// Sizes of a model, without its weights.
pub struct Shape {
    pub name: &'static str,
    /// See [`DeepstackFamily::ARCHITECTURES`].
    pub architectures: &'static [(&'static str, &'static str); 2],
    pub decoder: DecoderShape,
    pub rope_sections: [usize; 3],
    /// The key and value in `text_config` for the base and sections of the rotary positions.
    pub rope: fn(f64, [usize; 3]) -> (&'static str, Value),
    pub vision: TowerShape,
}

pub struct TowerShape {
    pub depth: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    /// Positions along a side of the position table's grid.
    pub grid: usize,
    /// Layers whose output is added after the decoder's first layers.
    pub parts: &'static [usize],
}

impl ReleasedShape for Shape {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.decoder
    }

    fn config(&self) -> Value {
        let Shape { decoder, vision, .. } = self;
        let mut text = decoder.config();
        let (class, kind) = self.architectures[usize::from(decoder.mixture.is_some())];
        let (rope_key, rope) = (self.rope)(decoder.rope_theta, self.rope_sections);
        text["model_type"] = format!("{kind}_text").into();
        text[rope_key] = rope;
        json!({
            "architectures": [class],
            "model_type": kind,
            "image_token_id": decoder.id("<|image_pad|>"),
            "video_token_id": decoder.id("<|video_pad|>"),
            "tie_word_embeddings": decoder.is_tied,
            "text_config": text,
            "vision_config": {
                "depth": vision.depth,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": vision.hidden,
                "intermediate_size": vision.intermediate,
                "num_heads": vision.heads,
                "in_channels": 3,
                "out_hidden_size": decoder.hidden,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": vision.grid * vision.grid,
                "deepstack_visual_indexes": vision.parts,
            },
        })
    }
}
