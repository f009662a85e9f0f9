//! The family's `config.json`.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    blocks::{
        AxesRule, ConfigError, DecoderConfig, DecoderDefaults, LayerKind, WIDTH_MAX, config_keys,
        vision::{EmbeddingLayout, PlaceholderTokens, TowerConfig, TowerInput, tower_rope},
    },
    checkpoint::Checkpoint,
    families::Settings,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: VisionConfig,
    pub tokens: PlaceholderTokens,
}

/// Sizes and settings of the vision tower.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct VisionConfig {
    /// Settings shared with the towers of other families.
    #[serde(flatten)]
    pub tower: TowerConfig,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Rows of the position table, which is a square grid.
    pub num_position_embeddings: usize,
    /// Tower layers whose output becomes a DeepStack part, in ascending order. Each part is added
    /// after one of the decoder's first layers.
    pub deepstack_visual_indexes: Vec<usize>,
    /// Width of the decoder.
    pub out_hidden_size: usize,
}

impl VisionConfig {
    /// Reads `vision_config` on top of the defaults of `Qwen3VLVisionConfig` (transformers 5.17,
    /// `configuration_qwen3_vl.py`).
    fn read(given: &Map<String, Value>) -> Result<Self, ConfigError> {
        let defaults = json!({
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "out_hidden_size": 3584,
            "rope_theta": tower_rope::THETA,
        });
        TowerConfig::read(given, &defaults, &["deepstack_visual_indexes"])
    }

    /// Positions along a side of the table's grid.
    pub fn grid_side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }

    /// Layout of the vision cache row that the tower writes for each token.
    pub fn row(&self) -> EmbeddingLayout {
        EmbeddingLayout { hidden: self.out_hidden_size, parts: self.deepstack_visual_indexes.len() }
    }

    fn check(&self, decoder: &DecoderConfig) -> Result<(), ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        self.check_sizes()?;
        self.tower.check(self.hidden_size, "gelu_pytorch_tanh")?;
        if self.grid_side().pow(2) != self.num_position_embeddings {
            let rows = self.num_position_embeddings;
            return contradiction(format!("vision_config.num_position_embeddings {rows} is not a square number"));
        }
        if self.out_hidden_size != decoder.hidden {
            let (out, hidden) = (self.out_hidden_size, decoder.hidden);
            return contradiction(format!("vision_config.out_hidden_size {out} is not hidden_size {hidden}"));
        }
        self.check_parts(decoder.layers)
    }

    /// Checks that each DeepStack part is taken from a different tower layer, and that there is a
    /// decoder layer after which the part is added.
    fn check_parts(&self, decoder_layers: usize) -> Result<(), ConfigError> {
        const KEY: &str = "vision_config.deepstack_visual_indexes";
        let (taken, depth) = (&self.deepstack_visual_indexes, self.tower.depth);
        let text = if let Some(index) = taken.iter().find(|index| **index >= depth) {
            format!("{KEY} names layer {index}, but the tower's depth is {depth}")
        } else if !taken.is_sorted_by(|one, next| one < next) {
            format!("{KEY} {taken:?} does not name layers in ascending order, each once")
        } else if taken.len() > decoder_layers {
            format!("{KEY} has {} parts for {decoder_layers} layers of the decoder", taken.len())
        } else {
            return Ok(());
        };
        Err(ConfigError::Contradiction(text))
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.num_position_embeddings", self.num_position_embeddings, WIDTH_MAX)
    }
}

impl Config {
    /// Reads `config.json` and checks the checkpoint's processors against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let is_mixed =
            checkpoint.model_type() == Some(MIXED) || checkpoint.architectures().any(|name| name == MIXED_CLASS);
        let decoder = decoder(config, is_mixed)?;
        let vision = VisionConfig::read(config_keys::part(config, "vision_config")?.unwrap_or(&Map::new()))?;
        vision.check(&decoder)?;
        let (images, videos) = (checkpoint.image_processor.as_ref(), Config::video_processor(checkpoint));
        TowerInput { counts_whole_videos: true, ..vision.tower.input() }.check(images, videos.as_ref())?;
        let tokens = PlaceholderTokens::read(config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }
}

/// Reads `text_config`. `tie_word_embeddings` may be in `text_config`, at the top level, or in both
/// with the same value.
fn decoder(config: &Map<String, Value>, is_mixed: bool) -> Result<DecoderConfig, ConfigError> {
    config_keys::refuse_unknown("", config)?;
    let none = Map::new();
    let text = config_keys::part(config, "text_config")?.unwrap_or(&none);
    let of_class = if is_mixed { mixed_defaults() } else { defaults() };
    let mut decoder = DecoderConfig::read("text_config.", text, &of_class)?;
    if let Some(mixture) = &mut decoder.mixture {
        // The model always renormalizes, whatever the file says (`modeling_qwen3_vl_moe.py`).
        mixture.renormalised = true;
    }
    let said =
        |place: &Map<String, Value>| place.get("tie_word_embeddings").map_or(Ok(None), Option::<bool>::deserialize);
    let (outer, inner) = (said(config)?, said(text)?);
    if let (Some(outer), Some(inner)) = (outer, inner)
        && outer != inner
    {
        let text = format!("tie_word_embeddings is {outer}, but {inner} in text_config");
        return Err(ConfigError::Contradiction(text));
    }
    decoder.tied_embeddings = outer.or(inner) == Some(true);
    Ok(decoder)
}

// Architecture name of the MoE variant, and its `model_type`.
pub(super) const MIXED_CLASS: &str = "Qwen3VLMoeForConditionalGeneration";
pub(super) const MIXED: &str = "qwen3_vl_moe";

/// Defaults of `Qwen3VLMoeTextConfig` (transformers 5.17, `configuration_qwen3_vl_moe.py`).
fn mixed_defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": true,
        "mlp_only_layers": null,
    });
    DecoderDefaults { fields, ..defaults() }
}

/// Defaults of `Qwen3VLTextConfig` (transformers 5.17, `configuration_qwen3_vl.py`; the
/// sections are from `modeling_qwen3_vl.py`).
fn defaults() -> DecoderDefaults {
    let fields = json!({
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
    });
    let axes = AxesRule::Interleaved([24, 20, 20]);
    DecoderDefaults { fields, rope_types: &["default"], axes, layer: LayerKind::HeadNorms }
}
