//! The family's `config.json`.

use bursar_kernels::ops::patchify::PatchSize;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    MergeSize,
    blocks::{
        ConfigError, DecoderConfig, WIDTH_MAX, config_keys,
        vision::{EmbeddingLayout, TowerInput},
    },
    checkpoint::Checkpoint,
    families::{gemma4_decoder, gemma4_prompt::PictureTokens},
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: VisionConfig,
    pub tokens: PictureTokens,
}

/// Sizes and settings of the embedder of pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Pixels along a side of a patch, which becomes one token.
    pub patch_side: usize,
    /// Width of projected patches.
    pub hidden: usize,
    /// Learned positions along each axis.
    pub positions: usize,
    /// Width of the decoder.
    pub out: usize,
    /// Epsilon that the norm before the last projection adds to the mean square.
    pub norm_epsilon: f32,
}

/// `vision_config`, with the field names of transformers.
#[derive(Deserialize)]
struct Fields {
    patch_size: usize,
    pooling_kernel_size: usize,
    mm_embed_dim: usize,
    mm_posemb_size: usize,
    output_proj_dims: usize,
    rms_norm_eps: f32,
}

impl Config {
    /// Reads `config.json` and checks the checkpoint's picture and video processors against it.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ConfigError> {
        let config = &checkpoint.config;
        let decoder = gemma4_decoder::read(config, true)?;
        let given = config_keys::part(config, "vision_config")?.ok_or_else(|| {
            let text = "vision_config is missing; the architecture of a checkpoint without pictures is Gemma4UnifiedForCausalLM";
            ConfigError::Contradiction(text.to_owned())
        })?;
        let vision = VisionConfig::read(given, decoder.hidden)?;
        let input = TowerInput {
            patch: vision.patch(),
            merge: MergeSize::new(1),
            fields: ["patch_size * pooling_kernel_size", "merge_size"],
            channels: 3,
            tile: None,
            counts_whole_videos: false,
            positions: Some(("mm_posemb_size", vision.positions)),
        };
        input.check(checkpoint.image_processor.as_ref(), checkpoint.video_processor.as_ref())?;
        let tokens = PictureTokens::read(config, decoder.vocabulary)?;
        Ok(Config { decoder, vision, tokens })
    }
}

impl VisionConfig {
    /// Reads `vision_config` on top of the defaults of `Gemma4UnifiedVisionConfig` (transformers
    /// 5.17, `configuration_gemma4_unified.py`). `out` is the width of the decoder.
    fn read(given: &Map<String, Value>, out: usize) -> Result<Self, ConfigError> {
        const PLACE: &str = "vision_config.";
        config_keys::refuse_unknown(PLACE, given)?;
        let defaults = json!({
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 3840,
            "mm_posemb_size": 1120,
            "output_proj_dims": 3840,
            "rms_norm_eps": 1e-6,
        });
        let fields: Fields = serde_json::from_value(config_keys::over(&defaults, given).into())?;
        ConfigError::check_size("vision_config.patch_size", fields.patch_size, 64)?;
        ConfigError::check_size("vision_config.pooling_kernel_size", fields.pooling_kernel_size, 4)?;
        ConfigError::check_size("vision_config.mm_embed_dim", fields.mm_embed_dim, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.mm_posemb_size", fields.mm_posemb_size, WIDTH_MAX)?;
        if fields.output_proj_dims != fields.mm_embed_dim {
            let (found, expected) = (fields.output_proj_dims, fields.mm_embed_dim);
            return Err(ConfigError::Contradiction(format!(
                "vision_config.output_proj_dims is {found}, but mm_embed_dim is {expected}"
            )));
        }
        Ok(VisionConfig {
            patch_side: fields.patch_size * fields.pooling_kernel_size,
            hidden: fields.mm_embed_dim,
            positions: fields.mm_posemb_size,
            out,
            norm_epsilon: fields.rms_norm_eps,
        })
    }

    /// Size of a patch, which has one frame.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_side, frames: 1 }
    }

    /// Layout of the vision cache row that the embedder writes for each token.
    pub fn row(&self) -> EmbeddingLayout {
        EmbeddingLayout::plain(self.out)
    }
}
