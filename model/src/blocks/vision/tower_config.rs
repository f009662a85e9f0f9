//! Settings that the `vision_config`s of all Qwen towers have.

use bursar_kernels::ops::patchify::PatchSize;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{TowerInput, tower_rope};
use crate::{
    MergeSize,
    blocks::{ConfigError, config_keys},
};

const PLACE: &str = "vision_config.";

/// The sizes and settings that have the same key for every Qwen tower.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TowerConfig {
    pub depth: usize,
    pub num_heads: usize,
    /// Color channels of a pixel.
    pub in_channels: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// Patches along a side of a merged patch.
    pub spatial_merge_size: usize,
    /// Frames that a patch spans.
    pub temporal_patch_size: usize,
    /// Activation of the MLP.
    hidden_act: String,
}

impl TowerConfig {
    /// Reads a family's `vision_config` on top of the `defaults` of its class. `followed` are the
    /// keys that only this family reads.
    pub fn read<T: DeserializeOwned>(
        given: &Map<String, Value>,
        defaults: &Value,
        followed: &[&str],
    ) -> Result<T, ConfigError> {
        config_keys::refuse_unknown_but(PLACE, given, followed)?;
        let mut fields = config_keys::over(defaults, given);
        tower_rope::check(PLACE, &fields)?;
        // `in_chans` is the older name of `in_channels`. Files saved again by newer transformers
        // versions have both.
        if let Some(channels) = fields.remove("in_chans").filter(|channels| !channels.is_null()) {
            fields.insert("in_channels".to_owned(), channels);
        }
        Ok(serde_json::from_value(fields.into())?)
    }

    /// Pixels and frames of a patch. Patches have three color channels: [`TowerInput`] refuses a
    /// tower with another number.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_size, frames: self.temporal_patch_size }
    }

    /// How patches merge into tokens.
    pub fn merge(&self) -> MergeSize {
        MergeSize::new(self.spatial_merge_size)
    }

    /// The input format of the tower, for a family whose pixel limits apply to each frame of a
    /// video.
    pub fn input(&self) -> TowerInput {
        let (patch, merge, channels) = (self.patch(), self.merge(), self.in_channels);
        TowerInput {
            patch,
            merge,
            fields: ["patch_size", "spatial_merge_size"],
            channels,
            tile: None,
            counts_whole_videos: false,
            positions: None,
        }
    }

    /// Refuses sizes out of range, an activation other than `activation`, and heads that cannot be
    /// rotated in a tower of width `hidden`.
    pub fn check(&self, hidden: usize, activation: &'static str) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.depth", self.depth, 1 << 12)?;
        ConfigError::check_size("vision_config.num_heads", self.num_heads, 1 << 12)?;
        ConfigError::check_size("vision_config.in_channels", self.in_channels, 16)?;
        ConfigError::check_size("vision_config.patch_size", self.patch_size, 256)?;
        ConfigError::check_size("vision_config.spatial_merge_size", self.spatial_merge_size, 16)?;
        ConfigError::check_size("vision_config.temporal_patch_size", self.temporal_patch_size, 16)?;
        if self.hidden_act != activation {
            let (field, value) = (format!("{PLACE}hidden_act"), self.hidden_act.clone());
            return Err(ConfigError::Unsupported { field, value, supported: activation });
        }
        tower_rope::head_dim(hidden, self.num_heads).map(drop)
    }
}
