//! The family's `config.json`.

use bursar_kernels::ops::patchify::PatchSize;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    MergeSize,
    blocks::{
        ConfigError, DecoderConfig, WIDTH_MAX, config_keys,
        rope_config::RopeConfig,
        vision::{EmbeddingLayout, TowerInput},
    },
    checkpoint::Checkpoint,
    families::{gemma4_decoder, gemma4_prompt::PictureTokens},
};

/// Base of the tower's rotary frequencies in the released models.
const THETA: f64 = 100.0;

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: VisionConfig,
    pub tokens: PictureTokens,
}

/// Sizes and settings of the vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    pub heads: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// How patches are pooled to tokens.
    pub merge: MergeSize,
    /// Learned positions along each axis.
    pub positions: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the inputs and outputs of projections are clamped.
    pub clips: bool,
    /// Whether pooled patches are standardized.
    pub standardizes: bool,
    /// Width of the decoder.
    pub out: usize,
    /// Epsilon that norms add to the mean square.
    pub norm_epsilon: f32,
}

/// `vision_config`, with the field names of transformers.
#[derive(Deserialize)]
struct Fields {
    num_hidden_layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    patch_size: usize,
    pooling_kernel_size: usize,
    position_embedding_size: usize,
    hidden_activation: String,
    rms_norm_eps: f32,
    use_clipped_linears: bool,
    standardize: bool,
    attention_bias: Option<bool>,
}

impl Config {
    /// Reads `config.json` and checks the checkpoint's picture and video processors against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let decoder = gemma4_decoder::read(config, false)?;
        let given = config_keys::part(config, "vision_config")?;
        let given = given.ok_or_else(|| {
            let text = "vision_config is missing; the architecture of a checkpoint without a vision tower is Gemma4ForCausalLM";
            ConfigError::Contradiction(text.to_owned())
        })?;
        let vision = VisionConfig::read(given, decoder.hidden)?;
        let input = TowerInput {
            patch: vision.patch(),
            merge: vision.merge,
            fields: ["patch_size", "pooling_kernel_size"],
            channels: 3,
            tile: None,
            counts_whole_videos: false,
            positions: Some(("position_embedding_size", vision.positions)),
        };
        input.check(checkpoint.image_processor.as_ref(), checkpoint.video_processor.as_ref())?;
        let tokens = PictureTokens::read(config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }
}

impl VisionConfig {
    /// Reads `vision_config` on top of the defaults of `Gemma4VisionConfig` (transformers 5.17,
    /// `configuration_gemma4.py`). `out` is the width of the decoder.
    fn read(given: &Map<String, Value>, out: usize) -> Result<Self, ConfigError> {
        const PLACE: &str = "vision_config.";
        config_keys::refuse_unknown(PLACE, given)?;
        let defaults = json!({
            "num_hidden_layers": 16,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10 * 1024,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "use_clipped_linears": false,
            "standardize": false,
            "rope_theta": THETA,
        });
        let given = config_keys::over(&defaults, given);
        let rope = RopeConfig::read(PLACE, &given, &["default", "axial"], &[])?;
        if rope != (RopeConfig { theta: rope.theta, ..RopeConfig::default() }) {
            let (field, value) = (format!("{PLACE}rope_parameters"), format!("{:?}", rope.scaling));
            return Err(ConfigError::Unsupported { field, value, supported: "unscaled frequencies" });
        }
        let fields: Fields = serde_json::from_value(given.into())?;
        fields.check()?;
        Ok(VisionConfig {
            layers: fields.num_hidden_layers,
            hidden: fields.hidden_size,
            intermediate: fields.intermediate_size,
            heads: fields.num_attention_heads,
            patch_size: fields.patch_size,
            merge: MergeSize::new(fields.pooling_kernel_size),
            positions: fields.position_embedding_size,
            rope_theta: rope.theta,
            clips: fields.use_clipped_linears,
            standardizes: fields.standardize,
            out,
            norm_epsilon: fields.rms_norm_eps,
        })
    }

    /// Size of a patch, which has one frame and three color channels.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_size, frames: 1 }
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Layout of the vision cache row that the tower writes for each token.
    pub fn row(&self) -> EmbeddingLayout {
        EmbeddingLayout::plain(self.out)
    }
}

impl Fields {
    fn check(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.num_hidden_layers", self.num_hidden_layers, 1 << 12)?;
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.num_attention_heads", self.num_attention_heads, 1 << 12)?;
        ConfigError::check_size("vision_config.patch_size", self.patch_size, 256)?;
        ConfigError::check_size("vision_config.pooling_kernel_size", self.pooling_kernel_size, 64)?;
        ConfigError::check_size("vision_config.position_embedding_size", self.position_embedding_size, WIDTH_MAX)?;
        let (heads, hidden, head_dim) = (self.num_attention_heads, self.hidden_size, self.head_dim);
        if heads.checked_mul(head_dim) != Some(hidden) || !head_dim.is_multiple_of(4) {
            return Err(ConfigError::Contradiction(format!(
                "vision_config: num_attention_heads {heads} times head_dim {head_dim} must be hidden_size {hidden}, and \
                 head_dim must be a multiple of 4"
            )));
        }
        const ACTIVATION: &str = "gelu_pytorch_tanh";
        let kv_heads = self.num_key_value_heads;
        let settings = [
            ("num_key_value_heads", kv_heads.to_string(), kv_heads == heads, "the number of query heads"),
            ("hidden_activation", self.hidden_activation.clone(), self.hidden_activation == ACTIVATION, ACTIVATION),
            ("attention_bias", "true".to_owned(), self.attention_bias != Some(true), "false"),
        ];
        ConfigError::check_supported("vision_config.", settings)
    }
}
