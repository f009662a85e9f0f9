//! The family's `config.json`.

use bursar_kernels::ops::patchify::PatchSize;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    MergeSize,
    blocks::{
        ConfigError, DecoderDefaults, LayerKind, WIDTH_MAX, config_keys, decoder::DecoderConfig,
        rope_config::RopeConfig, rope_scaling::RopeScaling,
    },
    processor::ImageProcessorConfig,
};

/// The family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The text part.
    pub decoder: DecoderConfig,
    /// The vision part.
    pub vision: VisionConfig,
    /// The token that stands for one merged patch of a picture.
    pub image_token: u32,
    /// The token that stands for one merged patch of a video's step; `None` if the checkpoint has no such token.
    pub video_token: Option<u32>,
}

/// The sizes and settings of the vision tower.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct VisionConfig {
    /// Number of layers.
    pub depth: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Colour channels of a pixel.
    pub in_channels: usize,
    /// The older name of `in_channels`; files that newer versions saved again have both.
    in_chans: Option<usize>,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// Patches along a side of a merged patch.
    pub spatial_merge_size: usize,
    /// Frames that a patch spans.
    pub temporal_patch_size: usize,
    /// Positions on the time axis per second of a video.
    pub tokens_per_second: usize,
    /// Pixels along a side of an attention window.
    pub window_size: usize,
    /// Layers whose attention covers the whole picture.
    pub fullatt_block_indexes: Vec<usize>,
    /// Width of the decoder.
    pub out_hidden_size: usize,
    /// Activation of the MLP.
    hidden_act: String,
}

/// Base of the tower's rotary frequencies.
pub const ROPE_THETA: f64 = 10_000.0;

impl VisionConfig {
    /// Reads `vision_config` over the defaults of `Qwen2_5_VLVisionConfig` (transformers 5.17,
    /// `configuration_qwen2_5_vl.py`). transformers saves only what differs from its defaults, and released files were
    /// saved by it.
    fn read(given: &Map<String, Value>) -> Result<Self, ConfigError> {
        const PLACE: &str = "vision_config.";
        config_keys::refuse_unknown(PLACE, given)?;
        let defaults = json!({
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 4,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "rope_theta": ROPE_THETA,
        });
        let fields = config_keys::over(&defaults, given);
        let rope = RopeConfig::read(PLACE, &fields, &["default", "axial"])?;
        if rope != (RopeConfig { theta: ROPE_THETA, scaling: RopeScaling::Plain, sections: None }) {
            let (field, value) = (format!("{PLACE}rope_theta"), rope.theta.to_string());
            return Err(ConfigError::Unsupported { field, value, supported: "10000" });
        }
        let mut config: VisionConfig = serde_json::from_value(fields.into())?;
        if let Some(channels) = config.in_chans.take() {
            config.in_channels = channels;
        }
        Ok(config)
    }

    /// Pixels and frames of a patch. It has three colour channels: `check_processor` refuses a tower with another
    /// number.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_size, frames: self.temporal_patch_size }
    }

    /// How patches merge into tokens.
    pub fn merge(&self) -> MergeSize {
        MergeSize::new(self.spatial_merge_size)
    }

    /// Merged patches along a side of a window.
    pub fn window_side(&self) -> usize {
        self.window_size / self.patch_size / self.spatial_merge_size
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    fn check(&self, decoder_hidden: usize) -> Result<(), ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        self.check_sizes()?;
        if self.hidden_act != "silu" {
            return Err(ConfigError::Unsupported {
                field: "vision_config.hidden_act".to_owned(),
                value: self.hidden_act.clone(),
                supported: "silu",
            });
        }
        if !self.hidden_size.is_multiple_of(4 * self.num_heads) {
            return contradiction(format!(
                "vision_config: {} heads of {} elements cannot be rotated along two axes",
                self.num_heads, self.hidden_size
            ));
        }
        if self.window_side() == 0 {
            return contradiction("vision_config: a window holds no merged patch".to_owned());
        }
        if self.out_hidden_size != decoder_hidden {
            return contradiction(format!(
                "vision_config.out_hidden_size {} is not hidden_size {decoder_hidden}",
                self.out_hidden_size
            ));
        }
        if let Some(index) = self.fullatt_block_indexes.iter().find(|index| **index >= self.depth) {
            return contradiction(format!(
                "vision_config.fullatt_block_indexes names layer {index}, but its depth is {}",
                self.depth
            ));
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.depth", self.depth, 1 << 12)?;
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.num_heads", self.num_heads, 1 << 12)?;
        ConfigError::check_size("vision_config.in_channels", self.in_channels, 16)?;
        ConfigError::check_size("vision_config.patch_size", self.patch_size, 256)?;
        ConfigError::check_size("vision_config.spatial_merge_size", self.spatial_merge_size, 16)?;
        ConfigError::check_size("vision_config.tokens_per_second", self.tokens_per_second, 1 << 10)?;
        ConfigError::check_size("vision_config.temporal_patch_size", self.temporal_patch_size, 16)
    }

    /// Refuses the processor of `what` ("image" or "video") if its patches differ from those that the tower reads.
    fn check_processor(&self, what: &str, processor: &ImageProcessorConfig) -> Result<(), ConfigError> {
        let pairs = [
            ("patch_size", self.patch_size, processor.patch_size),
            ("spatial_merge_size", self.spatial_merge_size, processor.merge_size),
            ("temporal_patch_size", self.temporal_patch_size, processor.temporal_patch_size),
            ("in_channels", self.in_channels, 3),
        ];
        match pairs.iter().find(|(_, tower, processor)| *tower != *processor as usize) {
            None => Ok(()),
            Some((field, tower, processor)) => Err(ConfigError::Contradiction(format!(
                "vision_config.{field} is {tower}, but the {what} processor's is {processor}"
            ))),
        }
    }
}

impl Config {
    /// Reads `config.json`, and checks the checkpoint's processors of pictures and of videos against it.
    pub fn read(
        config: &Map<String, Value>,
        processor: Option<&ImageProcessorConfig>,
        videos: Option<&ImageProcessorConfig>,
    ) -> Result<Self, ConfigError> {
        let decoder = decoder(config)?;
        let vision = VisionConfig::read(part(config, "vision_config")?.unwrap_or(&Map::new()))?;
        let processor = processor.ok_or_else(|| {
            let text = "the model takes pictures, but there is no preprocessor_config.json or processor_config.json";
            ConfigError::Contradiction(text.to_owned())
        })?;
        vision.check(decoder.hidden)?;
        vision.check_processor("image", processor)?;
        videos.map_or(Ok(()), |videos| vision.check_processor("video", videos))?;
        let token = |field: &str| config.get(field).map(u32::deserialize).transpose();
        let image_token = token("image_token_id")?.unwrap_or(IMAGE_TOKEN);
        let default = Some(VIDEO_TOKEN).filter(|token| (*token as usize) < decoder.vocabulary);
        let video_token = token("video_token_id")?.or(default);
        for (field, token) in [("image_token_id", Some(image_token)), ("video_token_id", video_token)] {
            if let Some(token) = token.filter(|token| *token as usize >= decoder.vocabulary) {
                let vocabulary = decoder.vocabulary;
                let text = format!("{field} is {token}, but vocab_size is {vocabulary}");
                return Err(ConfigError::Contradiction(text));
            }
        }
        if video_token == Some(image_token) {
            let text = format!("image_token_id and video_token_id are both {image_token}");
            return Err(ConfigError::Contradiction(text));
        }
        Ok(Config { decoder, vision, image_token, video_token })
    }
}

/// Defaults of `Qwen2_5_VLConfig`.
const IMAGE_TOKEN: u32 = 151_655;
const VIDEO_TOKEN: u32 = 151_656;

/// The object under `name`, if the file has it.
fn part<'c>(config: &'c Map<String, Value>, name: &str) -> Result<Option<&'c Map<String, Value>>, ConfigError> {
    match config.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(part)) => Ok(Some(part)),
        Some(_) => Err(ConfigError::Contradiction(format!("{name} is not an object"))),
    }
}

/// Reads the text fields: from `text_config` alone if there is one, else from the top level, as in releases.
/// `tie_word_embeddings` may be in either (transformers 5.17, `Qwen2_5_VLConfig.__post_init__`).
fn decoder(config: &Map<String, Value>) -> Result<DecoderConfig, ConfigError> {
    let Some(text) = part(config, "text_config")? else { return DecoderConfig::read("", config, &defaults()) };
    config_keys::refuse_unknown("", config)?;
    let mut decoder = DecoderConfig::read("text_config.", text, &defaults())?;
    decoder.tied_embeddings |= config.get("tie_word_embeddings").is_some_and(|tied| *tied == Value::Bool(true));
    Ok(decoder)
}

/// The defaults of `Qwen2_5_VLTextConfig` (transformers 5.17, `configuration_qwen2_5_vl.py`; the sections are from
/// `modeling_qwen2_5_vl.py`).
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
    DecoderDefaults {
        fields,
        rope_types: &["default", "mrope"],
        rope_sections: Some(&[16, 24, 24]),
        layer: LayerKind::QkvBias,
    }
}
