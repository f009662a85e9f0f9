//! The family's `config.json`.

use bursar_kernels::ops::patchify::PatchSize;
use serde::Deserialize;
use serde_json::{Map, json};

use crate::{
    MergeSize,
    blocks::{
        ConfigError, DecoderConfig, PictureMask, WIDTH_MAX, config_keys,
        vision::{EmbeddingLayout, TowerInput},
    },
    checkpoint::Checkpoint,
    families::gemma,
    flow::Grid,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: VisionConfig,
    pub image_token: u32,
}

/// Sizes and settings of the vision tower and the projector.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    pub heads: usize,
    /// Pixels along a side of a picture.
    pub image_size: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// How patches are pooled to tokens.
    pub merge: MergeSize,
    /// Width of the decoder.
    pub out: usize,
    /// Epsilon that norms add to the variance or to the mean square.
    pub norm_epsilon: f32,
}

/// `vision_config`, with the field names of transformers.
#[derive(Deserialize)]
struct Fields {
    num_hidden_layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_channels: usize,
    image_size: usize,
    patch_size: usize,
    hidden_act: String,
    layer_norm_eps: f32,
}

impl Config {
    /// Reads `config.json` and checks the checkpoint's picture processor against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let mut decoder = DecoderConfig::read_nested(config, &gemma::defaults())?;
        decoder.picture_mask = PictureMask::WholePicture;
        let none = Map::new();
        let fields = config_keys::part(config, "vision_config")?.unwrap_or(&none);
        // `null` is the default, as in transformers.
        let stated = |key: &str| config.get(key).map_or(Ok(None), Option::<usize>::deserialize);
        let tokens = stated("mm_tokens_per_image")?.unwrap_or(256);
        let vision = VisionConfig::read(fields, tokens, decoder.hidden)?;
        let input = TowerInput {
            patch: vision.patch(),
            merge: vision.merge,
            fields: ["patch_size", "spatial_merge_size"],
            channels: 3,
            tile: Some(vision.image_size),
            counts_whole_videos: false,
            positions: None,
        };
        input.check(checkpoint.image_processor.as_ref(), None)?;
        // transformers has saved this id under both names.
        let key = if config.contains_key("image_token_id") { "image_token_id" } else { "image_token_index" };
        let image_token = stated(key)?.unwrap_or(262_144);
        ConfigError::check_token(key, image_token, decoder.vocabulary)?;
        Ok(Config { decoder, vision, image_token: image_token as u32 })
    }
}

impl VisionConfig {
    /// Reads `vision_config` on top of the defaults of `SiglipVisionConfig` (transformers 5.17,
    /// `configuration_siglip.py`). A picture has `tokens` tokens of width `out`.
    fn read(given: &Map<String, serde_json::Value>, tokens: usize, out: usize) -> Result<Self, ConfigError> {
        config_keys::refuse_unknown("vision_config.", given)?;
        let defaults = json!({
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        });
        let fields: Fields = serde_json::from_value(config_keys::over(&defaults, given).into())?;
        fields.check()?;
        let patches = fields.image_size / fields.patch_size;
        let across = tokens.isqrt();
        if !fields.image_size.is_multiple_of(fields.patch_size) {
            let Fields { image_size, patch_size, .. } = fields;
            let text = format!("vision_config.image_size {image_size} is not a multiple of patch_size {patch_size}");
            return Err(ConfigError::Contradiction(text));
        }
        if across == 0 || across * across != tokens || !patches.is_multiple_of(across) {
            return Err(ConfigError::Contradiction(format!(
                "mm_tokens_per_image is {tokens}; expected the square of a divisor of {patches}, the patches along a side"
            )));
        }
        Ok(VisionConfig {
            layers: fields.num_hidden_layers,
            hidden: fields.hidden_size,
            intermediate: fields.intermediate_size,
            heads: fields.num_attention_heads,
            image_size: fields.image_size,
            patch_size: fields.patch_size,
            merge: MergeSize::new(patches / across),
            out,
            norm_epsilon: fields.layer_norm_eps,
        })
    }

    /// Size of a patch, which has one frame and three color channels.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_size, frames: 1 }
    }

    /// The patches of a picture.
    pub fn grid(&self) -> Grid {
        let side = (self.image_size / self.patch_size) as u32;
        Grid { t: 1, h: side, w: side }
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
        ConfigError::check_size("vision_config.image_size", self.image_size, 1 << 12)?;
        ConfigError::check_size("vision_config.patch_size", self.patch_size, 256)?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let (heads, hidden) = (self.num_attention_heads, self.hidden_size);
            return Err(ConfigError::Contradiction(format!(
                "vision_config: {hidden} elements cannot be divided among {heads} heads"
            )));
        }
        const ACTIVATION: &str = "gelu_pytorch_tanh";
        let settings = [
            ("num_channels", self.num_channels.to_string(), self.num_channels == 3, "3"),
            ("hidden_act", self.hidden_act.clone(), self.hidden_act == ACTIVATION, ACTIVATION),
        ];
        ConfigError::check_supported("vision_config.", settings)
    }
}
