//! The family's `config.json`, in the converted and in the released layout.

use bursar_kernels::ops::patchify::PatchSize;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::prompt_text;
use crate::{
    MergeSize,
    blocks::{
        ConfigError, DecoderConfig, WIDTH_MAX, config_keys,
        norm::NormKind,
        vision::{EmbeddingLayout, TowerInput},
    },
    checkpoint::Checkpoint,
    families::{ReadText, Settings},
    flow::Grid,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub decoder: DecoderConfig,
    pub vision: VisionConfig,
    pub image_token: u32,
    pub layout: Layout,
}

/// Origin of a checkpoint, which determines its keys and weight names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A checkpoint converted for transformers.
    Converted,
    /// The original release by the model's authors, with the names that the released code uses.
    Released,
}

/// Sizes and settings of the vision tower and the merger.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    pub heads: usize,
    /// Pixels along a side of a tile.
    pub image_size: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// How patches merge into tokens.
    pub merge: MergeSize,
    /// Width of the decoder.
    pub out: usize,
    pub norm: NormKind,
    /// Epsilon that the norms add to the variance (layer norm) or to the mean square (RMS norm).
    pub norm_epsilon: f32,
    /// Whether the projection of queries, keys and values has a bias.
    pub has_qkv_bias: bool,
    /// Whether queries and keys are normalized.
    pub has_qk_norm: bool,
    /// Epsilon that the norms of queries and keys add to the mean square.
    pub qk_norm_epsilon: f32,
}

/// `vision_config`, with the field names of transformers.
#[derive(Deserialize)]
struct Fields {
    num_hidden_layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_channels: usize,
    image_size: Side,
    patch_size: Side,
    hidden_act: String,
    norm_type: String,
    layer_norm_eps: f32,
    attention_bias: bool,
    use_qk_norm: bool,
    use_absolute_position_embeddings: bool,
    use_mean_pooling: bool,
    use_mask_token: bool,
}

/// The side of a square, as one number or as height and width.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Side {
    One(usize),
    Both([usize; 2]),
}

impl Side {
    fn read(self, field: &str) -> Result<usize, ConfigError> {
        match self {
            Side::One(side) => Ok(side),
            Side::Both([height, width]) if height == width => Ok(height),
            Side::Both([height, width]) => {
                Err(ConfigError::Contradiction(format!("vision_config.{field} is {height} x {width}, not a square")))
            }
        }
    }
}

impl Layout {
    fn of(checkpoint: &Checkpoint) -> Self {
        let is_released = checkpoint.config.contains_key("llm_config");
        if is_released { Layout::Released } else { Layout::Converted }
    }

    /// Key of the text model's settings in `config.json`.
    fn text_key(self) -> &'static str {
        match self {
            Layout::Converted => "text_config",
            Layout::Released => "llm_config",
        }
    }

    /// Defaults of `InternVLVisionConfig` (transformers 5.17, `configuration_internvl.py`), or of
    /// `InternVisionConfig` (`configuration_intern_vit.py` of the releases).
    fn vision_defaults(self) -> Value {
        let common = json!({
            "num_channels": 3,
            "patch_size": 14,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            "use_absolute_position_embeddings": true,
            "use_mean_pooling": true,
            "use_mask_token": false,
        });
        let own = match self {
            Layout::Converted => json!({
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
                "image_size": 448,
                "attention_bias": false,
                "use_qk_norm": false,
                "norm_type": "layer_norm",
            }),
            Layout::Released => json!({
                "hidden_size": 3200,
                "num_hidden_layers": 48,
                "num_attention_heads": 25,
                "intermediate_size": 12_800,
                "image_size": 224,
                "attention_bias": false,
                "use_qk_norm": true,
                "norm_type": "rms_norm",
            }),
        };
        Value::Object(config_keys::over(&common, own.as_object().expect("an object")))
    }
}

impl Config {
    /// Reads `config.json` and checks the checkpoint's picture and video processors against it.
    pub fn read(checkpoint: &Checkpoint, text: ReadText) -> Result<Self, ConfigError> {
        let (config, layout) = (&checkpoint.config, Layout::of(checkpoint));
        config_keys::refuse_unknown("", config)?;
        check_settings(config, layout)?;
        let decoder = decoder(checkpoint, layout, text)?;
        let none = Map::new();
        let vision = config_keys::part(config, "vision_config")?.unwrap_or(&none);
        let vision = VisionConfig::read(vision, layout, merge(config)?, decoder.hidden)?;
        vision.check_counts(config)?;
        vision.check_processors(checkpoint)?;
        let image_token = image_token(checkpoint, layout)?;
        ConfigError::check_token("image_token_id", image_token as usize, decoder.vocabulary)?;
        Ok(Config { decoder, vision, image_token, layout })
    }
}

/// Refuses settings that would change the computation.
fn check_settings(config: &Map<String, Value>, layout: Layout) -> Result<(), ConfigError> {
    let supported: &[(&str, Value, &'static str)] = match layout {
        Layout::Converted => &[
            ("projector_hidden_act", json!("gelu"), "gelu"),
            ("vision_feature_layer", json!(-1), "-1"),
            ("vision_feature_select_strategy", json!("default"), "default"),
        ],
        // Without `ps_version`, the pixel shuffle that joins patches is v1.
        Layout::Released => &[
            ("ps_version", json!("v2"), "v2"),
            ("select_layer", json!(-1), "-1"),
            ("use_backbone_lora", json!(0), "0: merge the adapter first"),
            ("use_llm_lora", json!(0), "0: merge the adapter first"),
        ],
    };
    let ps_version = (layout == Layout::Released && !config.contains_key("ps_version")).then(|| json!("v1"));
    let stated = |key: &str| config.get(key).or(ps_version.as_ref().filter(|_| key == "ps_version"));
    match supported.iter().find(|(key, wanted, _)| stated(key).is_some_and(|found| found != wanted)) {
        None => Ok(()),
        Some((key, _, supported)) => {
            let value = stated(key).map(Value::to_string).unwrap_or_default();
            Err(ConfigError::Unsupported { field: (*key).to_owned(), value, supported })
        }
    }
}

/// Reads `downsample_ratio`. 0.5 merges two by two patches.
fn merge(config: &Map<String, Value>) -> Result<MergeSize, ConfigError> {
    let ratio = config.get("downsample_ratio").map(f64::deserialize).transpose()?.unwrap_or(0.5);
    if ratio == 0.5 {
        Ok(MergeSize::new(2))
    } else {
        Err(ConfigError::Unsupported {
            field: "downsample_ratio".to_owned(),
            value: ratio.to_string(),
            supported: "0.5",
        })
    }
}

/// Reads the text model's settings. If the top level of `config.json` does not specify whether the
/// output projection is tied to the embedding, the projection is untied if the checkpoint has
/// `lm_head`. Otherwise, the text model's settings decide, and without a setting, the projection is
/// tied. transformers ties by default, but only if the tensors are equal.
fn decoder(checkpoint: &Checkpoint, layout: Layout, read: ReadText) -> Result<DecoderConfig, ConfigError> {
    let (key, none) = (layout.text_key(), Map::new());
    let text = config_keys::part(&checkpoint.config, key)?.unwrap_or(&none);
    let model_type = text.get("model_type").map(String::deserialize).transpose()?.unwrap_or_else(|| "qwen2".to_owned());
    let mut decoder = read(&model_type, &format!("{key}."), text).unwrap_or_else(|| {
        Err(ConfigError::Unsupported {
            field: format!("{key}.model_type"),
            value: model_type,
            supported: "qwen2, qwen3 and qwen3_moe",
        })
    })?;
    let stated = |part: &Map<String, Value>| part.get("tie_word_embeddings").map(bool::deserialize).transpose();
    let heads = ["lm_head.weight", "language_model.lm_head.weight"];
    decoder.tied_embeddings = match stated(&checkpoint.config)? {
        Some(is_tied) => is_tied,
        // A random or planned checkpoint has no tensors to look up. Without a setting, its
        // projection is untied.
        None if is_drawn(checkpoint) => stated(text)?.unwrap_or(false),
        None => !heads.iter().any(|head| checkpoint.tensors.contains(head)) && stated(text)?.unwrap_or(true),
    };
    Ok(decoder)
}

/// Whether the weights are random or only planned.
fn is_drawn(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors.random("lm_head.weight", 2).is_some()
}

/// Returns the id of the placeholder token. Released checkpoints have this id only in their
/// vocabulary. A checkpoint that is only planned may have no vocabulary. In that case any id is
/// acceptable.
fn image_token(checkpoint: &Checkpoint, layout: Layout) -> Result<u32, ConfigError> {
    let stated = checkpoint.config.get("image_token_id").map(u32::deserialize).transpose()?;
    match (stated, layout) {
        (Some(token), _) => Ok(token),
        (None, Layout::Converted) => Ok(151_667),
        (None, Layout::Released) => {
            checkpoint.added_token(prompt_text::IMAGE).or(is_drawn(checkpoint).then_some(0)).ok_or_else(|| {
                ConfigError::Contradiction(format!(
                    "the model takes pictures, but no added token is {}",
                    prompt_text::IMAGE
                ))
            })
        }
    }
}

impl VisionConfig {
    fn read(given: &Map<String, Value>, layout: Layout, merge: MergeSize, out: usize) -> Result<Self, ConfigError> {
        const PLACE: &str = "vision_config.";
        config_keys::refuse_unknown_but(PLACE, given, &["use_qk_norm"])?;
        let mut merged = config_keys::over(&layout.vision_defaults(), given);
        if layout == Layout::Released {
            for (name, own) in [("attention_bias", "qkv_bias"), ("use_qk_norm", "qk_normalization")] {
                merged.extend(given.get(own).map(|value| (name.to_owned(), value.clone())));
            }
        }
        let fields: Fields = serde_json::from_value(merged.into())?;
        fields.check()?;
        VisionConfig {
            layers: fields.num_hidden_layers,
            hidden: fields.hidden_size,
            intermediate: fields.intermediate_size,
            heads: fields.num_attention_heads,
            image_size: fields.image_size.read("image_size")?,
            patch_size: fields.patch_size.read("patch_size")?,
            merge,
            out,
            norm: if fields.norm_type == "layer_norm" { NormKind::Layer } else { NormKind::RootMeanSquare },
            norm_epsilon: fields.layer_norm_eps,
            has_qkv_bias: fields.attention_bias,
            has_qk_norm: fields.use_qk_norm,
            // transformers uses this constant instead of `layer_norm_eps`.
            qk_norm_epsilon: if layout == Layout::Released { fields.layer_norm_eps } else { 1e-6 },
        }
        .with_whole_tiles()
    }

    fn with_whole_tiles(self) -> Result<Self, ConfigError> {
        let merged = self.patch_size * self.merge.side();
        if self.image_size.is_multiple_of(merged) {
            Ok(self)
        } else {
            Err(ConfigError::Contradiction(format!(
                "vision_config.image_size {} is not a multiple of {merged}, two patches",
                self.image_size
            )))
        }
    }

    /// Size of a patch, which has one frame and three color channels.
    pub fn patch(&self) -> PatchSize {
        PatchSize { side: self.patch_size, frames: 1 }
    }

    pub fn tile(&self) -> Grid {
        let side = (self.image_size / self.patch_size) as u32;
        Grid { t: 1, h: side, w: side }
    }

    /// Layout of the vision cache row that the tower writes for each token.
    pub fn row(&self) -> EmbeddingLayout {
        EmbeddingLayout::plain(self.out)
    }

    /// Checks the other keys that describe a tile against these sizes.
    fn check_counts(&self, config: &Map<String, Value>) -> Result<(), ConfigError> {
        let tokens = self.tile().tokens(self.merge);
        for (key, expected) in [("image_seq_length", tokens), ("force_image_size", self.image_size)] {
            let stated = config.get(key).map(Option::<usize>::deserialize).transpose()?.flatten();
            if let Some(stated) = stated.filter(|stated| *stated != expected) {
                let text = format!("{key} is {stated}, but vision_config gives {expected}");
                return Err(ConfigError::Contradiction(text));
            }
        }
        Ok(())
    }

    /// Refuses processors whose patches or tiles differ from the input of the tower.
    fn check_processors(&self, checkpoint: &Checkpoint) -> Result<(), ConfigError> {
        let (patch, merge, tile) = (self.patch(), self.merge, Some(self.image_size));
        let input = TowerInput {
            patch,
            merge,
            fields: ["patch_size", "spatial_merge_size"],
            channels: 3,
            tile,
            counts_whole_videos: false,
            positions: None,
        };
        input.check(checkpoint.image_processor.as_ref(), Config::video_processor(checkpoint).as_ref())
    }
}

impl Fields {
    fn check(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.num_hidden_layers", self.num_hidden_layers, 1 << 12)?;
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.num_attention_heads", self.num_attention_heads, 1 << 12)?;
        ConfigError::check_size("vision_config.image_size", self.image_size.read("image_size")?, 1 << 12)?;
        ConfigError::check_size("vision_config.patch_size", self.patch_size.read("patch_size")?, 256)?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let (heads, hidden) = (self.num_attention_heads, self.hidden_size);
            return Err(ConfigError::Contradiction(format!(
                "vision_config: {hidden} elements cannot be divided among {heads} heads"
            )));
        }
        let is_known = ["layer_norm", "rms_norm"].contains(&self.norm_type.as_str());
        let settings = [
            ("num_channels", self.num_channels.to_string(), self.num_channels == 3, "3"),
            ("hidden_act", self.hidden_act.clone(), self.hidden_act == "gelu", "gelu"),
            ("norm_type", self.norm_type.clone(), is_known, "layer_norm and rms_norm"),
            ("use_mean_pooling", "false".to_owned(), self.use_mean_pooling, "true"),
            ("use_mask_token", "true".to_owned(), !self.use_mask_token, "false"),
            ("use_absolute_position_embeddings", "false".to_owned(), self.use_absolute_position_embeddings, "true"),
        ];
        ConfigError::check_supported("vision_config.", settings)
    }
}
