//! The only list of families: which code serves which checkpoint.

use bursar_budgets::Hint;
use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::patchify::PatchSize};
use serde_json::Value;
use thiserror::Error;

pub use crate::families::qwen2_5_vl::PictureBatch;
use crate::{
    Depth, LoadError, MergeSize,
    blocks::{
        ConfigError,
        decoder::{Decoder, DecoderConfig},
    },
    checkpoint::{Checkpoint, CheckpointSource, RandomCheckpoint},
    error::CheckpointError,
    families::{
        qwen2,
        qwen2_5_vl::{self, Placeholders},
    },
    flow::{LayoutError, PromptLayout, ResizedImage, VisualGrid},
    processor::{ImageProcessor, VideoProcessor},
    text::{Tokenizer, byte_level},
    weights::{WeightError, WeightMap},
    workload::{Workload, covered},
};

/// No family here serves the checkpoint's architecture.
#[derive(Debug, Error)]
#[error("no family serves the architecture {found:?}; known: {known}")]
pub struct UnknownArchitecture {
    /// `architectures` of the checkpoint.
    pub found: Vec<String>,
    /// All served architectures, separated by commas.
    pub known: String,
}

/// No shape has this name.
#[derive(Debug, Error)]
#[error("no shape is called {name:?}; known: {known}")]
pub struct UnknownShape {
    /// The requested name.
    pub name: String,
    /// The names of all shapes, separated by commas.
    pub known: String,
}

impl Hint for UnknownShape {
    type Text = String;

    fn hint(&self) -> String {
        format!("ask for one of: {}", self.known)
    }
}

/// The names of all shapes that [`random_checkpoint`] makes.
pub fn shapes() -> impl Iterator<Item = &'static str> {
    let visual = qwen2_5_vl::SHAPES.iter().map(|shape| shape.name);
    visual.chain(qwen2::SHAPES.iter().map(|shape| shape.name))
}

/// A checkpoint with the settings and the vocabulary size of a released model, and random weights. It measures the
/// speed and the memory of a model without its 16 GB of files.
///
/// # Errors
/// [`UnknownShape`] if no shape has that name.
pub fn random_checkpoint(shape: &str, seed: u64) -> Result<RandomCheckpoint, UnknownShape> {
    let visual = qwen2_5_vl::SHAPES.iter().find(|known| known.name == shape).map(qwen2_5_vl::Shape::files);
    let text = || qwen2::SHAPES.iter().find(|known| known.name == shape).map(qwen2::Shape::files);
    match visual.or_else(text) {
        Some(files) => Ok(RandomCheckpoint::new(shape, seed, files)),
        None => Err(UnknownShape { name: shape.to_owned(), known: shapes().collect::<Vec<_>>().join(", ") }),
    }
}

/// The checkpoint at `source` without its weights, for planning. It needs `config.json` and uses the other files that
/// are there. A missing tokenizer is replaced by one of bytes, and missing settings of an image processor by those of
/// the family's release.
///
/// # Errors
/// [`CheckpointError::MissingFile`] without `config.json`; a file that cannot be read.
pub fn without_weights(source: CheckpointSource) -> Result<RandomCheckpoint, CheckpointError> {
    let config: Value = serde_json::from_slice(&source.require("config.json")?).unwrap_or_default();
    let mut files = vec![("tokenizer.json", byte_level::tokenizer(0, &[]))];
    let has_processor =
        source.read("preprocessor_config.json")?.is_some() || source.read("processor_config.json")?.is_some();
    if !has_processor && config.get("vision_config").is_some() {
        files.push(("preprocessor_config.json", qwen2_5_vl::processor(&config).to_string().into_bytes()));
    }
    Ok(RandomCheckpoint::over(source, files))
}

/// A family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum FamilyConfig {
    /// Qwen2 and Qwen2.5: text only.
    Qwen2(qwen2::Config),
    /// Qwen2.5-VL: pictures, videos and text.
    Qwen2_5Vl(qwen2_5_vl::Config),
}

impl FamilyConfig {
    /// Reads `config.json` with the family that serves one of its `architectures`.
    ///
    /// # Errors
    /// No family serves it, its family cannot build what it describes, or the checkpoint's image processor is another
    /// model's.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let config = &checkpoint.config;
        if serves(checkpoint, qwen2_5_vl::ARCHITECTURES, qwen2_5_vl::MODEL_TYPE)? {
            let processor = checkpoint.image_processor.as_ref().map(ImageProcessor::config);
            let videos = checkpoint.video_processor.as_ref().map(VideoProcessor::config);
            return Ok(FamilyConfig::Qwen2_5Vl(qwen2_5_vl::Config::read(config, processor, videos)?));
        }
        if serves(checkpoint, qwen2::ARCHITECTURES, qwen2::MODEL_TYPE)? {
            return Ok(FamilyConfig::Qwen2(qwen2::Config::read(config)?));
        }
        let known = [qwen2_5_vl::ARCHITECTURES, qwen2::ARCHITECTURES].concat().join(", ");
        let mut found: Vec<_> = checkpoint.architectures().map(str::to_owned).collect();
        if found.is_empty() {
            found.extend(checkpoint.model_type().map(str::to_owned));
        }
        Err(UnknownArchitecture { found, known }.into())
    }

    /// Whether each id of the checkpoint's tokenizer has a row of this model's vocabulary.
    ///
    /// # Errors
    /// The tokenizer is another model's.
    pub fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<(), LoadError> {
        let (ids, rows) = (tokenizer.vocabulary_size(), self.decoder().vocabulary);
        if ids > rows {
            let said = format!("vocab_size is {rows}, but the tokenizer has {ids} ids");
            return Err(ConfigError::Contradiction(said).into());
        }
        Ok(())
    }

    /// The family's name in `config.json`; the first, where it has several.
    pub fn architecture(&self) -> &'static str {
        match self {
            FamilyConfig::Qwen2(_) => qwen2::ARCHITECTURES[0],
            FamilyConfig::Qwen2_5Vl(_) => qwen2_5_vl::ARCHITECTURES[0],
        }
    }

    /// The decoder's sizes.
    pub fn decoder(&self) -> &DecoderConfig {
        match self {
            FamilyConfig::Qwen2(config) => &config.decoder,
            FamilyConfig::Qwen2_5Vl(config) => &config.decoder,
        }
    }

    /// The kinds of work that serving it puts on a device. A family with a kind that no worst case covers does not
    /// compile.
    pub fn workloads(&self) -> &'static [Workload] {
        match self {
            FamilyConfig::Qwen2(_) => const { covered(qwen2::WORKLOADS) },
            FamilyConfig::Qwen2_5Vl(_) => const { covered(qwen2_5_vl::WORKLOADS) },
        }
    }

    /// How patches merge into tokens; `None` if the family takes no pictures.
    pub fn merge(&self) -> Option<MergeSize> {
        match self {
            FamilyConfig::Qwen2(_) => None,
            FamilyConfig::Qwen2_5Vl(config) => Some(config.vision.merge()),
        }
    }

    /// Pixels and frames of one patch; `None` if the family takes no pictures.
    pub fn patch(&self) -> Option<PatchSize> {
        match self {
            FamilyConfig::Qwen2(_) => None,
            FamilyConfig::Qwen2_5Vl(config) => Some(config.vision.patch()),
        }
    }

    /// The id of the placeholder token for pictures; `None` if the family takes no pictures.
    pub fn image_token(&self) -> Option<u32> {
        match self {
            FamilyConfig::Qwen2(_) => None,
            FamilyConfig::Qwen2_5Vl(config) => Some(config.image_token),
        }
    }

    /// Expands each placeholder to one token per embedding of its picture or video, and gives every token its position.
    /// A video takes one span per step of time.
    ///
    /// # Errors
    /// The prompt has more or fewer placeholders than `visuals` has pictures or videos, or the family takes none.
    pub fn lay_out(&self, tokens: Vec<u32>, visuals: &[VisualGrid]) -> Result<PromptLayout, LayoutError> {
        match self {
            FamilyConfig::Qwen2(_) if visuals.is_empty() => Ok(qwen2::lay_out(tokens)),
            FamilyConfig::Qwen2(_) => Err(LayoutError::TextOnly { pictures: visuals.len() }),
            FamilyConfig::Qwen2_5Vl(config) => qwen2_5_vl::lay_out(&tokens, visuals, &Placeholders::of(config)),
        }
    }

    pub(crate) fn claim(self, map: &mut WeightMap<'_>) -> Result<Family, WeightError> {
        Ok(match self {
            FamilyConfig::Qwen2(config) => Family::Qwen2(qwen2::Model::claim(config, map)?),
            FamilyConfig::Qwen2_5Vl(config) => Family::Qwen2_5Vl(qwen2_5_vl::Model::claim(config, map)?),
        })
    }
}

/// Whether one of the checkpoint's architectures is among a family's. Without `architectures`, `model_type` decides, as
/// in transformers (5.17, `models/auto/configuration_auto.py`). Where the file has both, they must agree.
fn serves(checkpoint: &Checkpoint, architectures: &[&str], model_type: &str) -> Result<bool, ConfigError> {
    if checkpoint.architectures().next().is_none() {
        return Ok(checkpoint.model_type() == Some(model_type));
    }
    let Some(name) = checkpoint.architectures().find(|name| architectures.contains(name)) else { return Ok(false) };
    match checkpoint.model_type() {
        Some(other) if other != model_type => {
            Err(ConfigError::Contradiction(format!("architectures names {name}, but model_type is {other}")))
        }
        _ => Ok(true),
    }
}

/// A family's weights.
#[expect(clippy::large_enum_variant, reason = "a model has one of it, and never moves it")]
pub(crate) enum Family {
    Qwen2(qwen2::Model),
    Qwen2_5Vl(qwen2_5_vl::Model),
}

impl Family {
    pub(crate) fn decoder(&self) -> &Decoder {
        match self {
            Family::Qwen2(model) => &model.decoder,
            Family::Qwen2_5Vl(model) => &model.decoder,
        }
    }

    fn tower(&self) -> &qwen2_5_vl::VisionTower {
        match self {
            Family::Qwen2(_) => panic!("a text-only family was given pictures; lay_out refuses them"),
            Family::Qwen2_5Vl(model) => &model.vision,
        }
    }

    pub(crate) fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PictureBatch {
        self.tower().pack(pictures)
    }

    pub(crate) fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.tower().encode(scope, batch, cache, depth)
    }
}
