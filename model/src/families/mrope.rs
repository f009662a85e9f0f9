//! Families with the decoder of Qwen2-VL (arXiv 2409.12191): Qwen2 with multimodal rotary
//! positions. Each family provides the names and sizes of its models, and its vision tower.

use std::fmt::Debug;

use serde_json::{Map, Value, json};

use super::row::{Files, ReadText, ReleasedShape, Settings, VisionSettings};
use crate::{
    blocks::{
        AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WindowRule, config_keys,
        decoder_shape::DecoderShape,
        vision::{
            EmbeddingLayout, PlaceholderTokens, Placeholders, QWEN_PLACEHOLDERS, TowerConfig, VideoPlace, lay_out,
            released_processor,
        },
    },
    checkpoint::Checkpoint,
    flow::{LayoutError, MediaGrid, PromptLayout},
    text::PlaceholderTexts,
    workload::Workload,
};

/// Settings of a family's vision tower.
pub trait VisionTowerConfig: Clone + Debug + PartialEq + 'static {
    type Sizes: TowerSizes;

    const SHAPES: &'static [Shape<Self::Sizes>];

    /// Reads `vision_config` and checks it against the width of the decoder.
    fn read(given: &Map<String, Value>, decoder_hidden: usize) -> Result<Self, ConfigError>;

    /// Settings shared with the towers of other families.
    fn tower(&self) -> &TowerConfig;

    fn video_place(&self) -> VideoPlace;
}

/// Sizes of a released tower.
pub trait TowerSizes: 'static {
    const ARCHITECTURE: (&'static str, &'static str);

    /// `vision_config` of a model whose decoder has this width.
    fn vision_config(&self, decoder_hidden: usize) -> Value;
}

/// The configuration of a family.
#[derive(Clone, Debug, PartialEq)]
pub struct Config<V> {
    pub decoder: DecoderConfig,
    pub vision: V,
    tokens: PlaceholderTokens,
}

impl<V: VisionTowerConfig> Settings for Config<V> {
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[V::Sizes::ARCHITECTURE];

    /// All workloads. The encoder processes a video as pictures, so videos add no workload.
    const WORKLOADS: &'static [Workload] = Workload::ALL;

    type Shape = Shape<V::Sizes>;

    const SHAPES: &'static [Shape<V::Sizes>] = V::SHAPES;

    fn read(checkpoint: &Checkpoint, _: ReadText) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let decoder = DecoderConfig::read_nested(config, &defaults())?;
        let none = Map::new();
        let vision = V::read(config_keys::part(config, "vision_config")?.unwrap_or(&none), decoder.hidden)?;
        let (images, videos) = (checkpoint.image_processor.as_ref(), Self::video_processor(checkpoint));
        vision.tower().input().check(images, videos.as_ref())?;
        let tokens = PlaceholderTokens::read(config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        &mut self.decoder
    }

    fn pictures(&self) -> Option<VisionSettings> {
        let (merge, patch, token) = (self.vision.tower().merge(), self.vision.tower().patch(), self.tokens.image);
        let row = EmbeddingLayout::plain(self.decoder.hidden);
        Some(VisionSettings { merge, patch, token, row, step_text_tokens: 0, tile: None })
    }

    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        Some(QWEN_PLACEHOLDERS)
    }

    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        let (merge, video) = (self.vision.tower().merge(), self.vision.video_place());
        lay_out(&tokens, visuals, &Placeholders { tokens: self.tokens, merge, video })
    }

    fn released_processors(config: &Value) -> Option<Files> {
        let is_ours = config["model_type"] == V::Sizes::ARCHITECTURE.1;
        is_ours.then(|| vec![("preprocessor_config.json", released_processor(config).to_string().into_bytes())])
    }
}

/// Defaults of `Qwen2VLTextConfig` and of `Qwen2_5_VLTextConfig` (transformers 5.17; the sections
/// are from `modeling_qwen2_vl.py` and `modeling_qwen2_5_vl.py`).
fn defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "max_window_layers": 80,
    });
    let axes = AxesRule::Consecutive([16, 24, 24]);
    let (rope_types, layer) = (&["default", "mrope"], LayerKind::QkvBias);
    DecoderDefaults { fields, rope_types, axes, layer, window: WindowRule::PerLayer }
}

/// Sizes of a model, without its weights.
pub struct Shape<S> {
    pub name: &'static str,
    pub decoder: DecoderShape,
    pub rope_sections: [usize; 3],
    pub vision: S,
}

impl<S: TowerSizes> ReleasedShape for Shape<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decoder(&self) -> &DecoderShape {
        &self.decoder
    }

    fn config(&self) -> Value {
        let (class, kind) = S::ARCHITECTURE;
        let decoder = &self.decoder;
        let mut config = decoder.config();
        config["architectures"] = [class].into();
        config["model_type"] = kind.into();
        config["image_token_id"] = decoder.id("<|image_pad|>").into();
        config["video_token_id"] = decoder.id("<|video_pad|>").into();
        config["rope_scaling"] = json!({ "type": "mrope", "mrope_section": self.rope_sections });
        config["vision_config"] = self.vision.vision_config(decoder.hidden);
        config
    }
}
