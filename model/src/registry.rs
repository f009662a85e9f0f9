//! The only list of families: which code serves which checkpoint.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::patchify::PatchSize};
use thiserror::Error;

pub use crate::families::qwen2_5_vl::PictureBatch;
use crate::{
    Depth, LoadError,
    blocks::{
        ConfigError,
        decoder::{Decoder, DecoderConfig},
    },
    checkpoint::{Checkpoint, RandomCheckpoint},
    families::{
        qwen2,
        qwen2_5_vl::{self, Placeholders},
    },
    flow::{LayoutError, Patches, PromptLayout, VisualGrid},
    processor::{ImageProcessor, VideoProcessor},
    strain::{Strain, stressed},
    weights::{WeightError, WeightMap},
};

/// A checkpoint of a family that no code here serves.
#[derive(Debug, Error)]
#[error("no family serves the architecture {found:?}; known: {known}")]
pub struct UnknownArchitecture {
    /// `architectures` of the checkpoint.
    pub found: Vec<String>,
    /// All that are served.
    pub known: String,
}

/// A shape that nobody has written down.
#[derive(Debug, Error)]
#[error("no shape is called {name:?}; known: {known}")]
pub struct UnknownShape {
    /// What was asked for.
    pub name: String,
    /// All there are.
    pub known: String,
}

impl UnknownShape {
    /// What to change.
    pub fn hint(&self) -> String {
        format!("ask for one of: {}", self.known)
    }
}

/// The names of all shapes that [`random_checkpoint`] makes.
pub fn shapes() -> impl Iterator<Item = &'static str> {
    qwen2_5_vl::SHAPES.iter().map(|shape| shape.name)
}

/// A checkpoint with the settings and a vocabulary of the size of a released model, and random weights: what its speed
/// and its memory are measured with when its 16 GB are not here.
///
/// # Errors
/// No shape has that name.
pub fn random_checkpoint(shape: &str, seed: u64) -> Result<RandomCheckpoint, UnknownShape> {
    match qwen2_5_vl::SHAPES.iter().find(|known| known.name == shape) {
        Some(shape) => Ok(RandomCheckpoint::new(shape.name, seed, shape.files())),
        None => Err(UnknownShape { name: shape.to_owned(), known: shapes().collect::<Vec<_>>().join(", ") }),
    }
}

/// A family's configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum FamilyConfig {
    /// Text only.
    Qwen2(qwen2::Config),
    /// Pictures and text.
    Qwen2_5Vl(qwen2_5_vl::Config),
}

impl FamilyConfig {
    /// Reads `config.json` with the family that serves one of its `architectures`.
    ///
    /// # Errors
    /// No family serves it, its family cannot build what it describes, or the checkpoint's tokenizer or image
    /// processor is another model's.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let config = Self::read(checkpoint)?;
        let (ids, rows) = (checkpoint.tokenizer().vocabulary_size(), config.decoder().vocabulary);
        if ids > rows {
            return Err(
                ConfigError::Contradiction(format!("vocab_size is {rows}, but the tokenizer has {ids} ids")).into()
            );
        }
        Ok(config)
    }

    fn read(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let config = &checkpoint.config;
        let serves = |known: &[&str]| checkpoint.architectures().any(|name| known.contains(&name));
        if serves(qwen2_5_vl::ARCHITECTURES) {
            let processor = checkpoint.image_processor.as_ref().map(ImageProcessor::config);
            let videos = checkpoint.video_processor.as_ref().map(VideoProcessor::config);
            return Ok(FamilyConfig::Qwen2_5Vl(qwen2_5_vl::Config::read(config, processor, videos)?));
        }
        if serves(qwen2::ARCHITECTURES) {
            return Ok(FamilyConfig::Qwen2(qwen2::Config::read(config)?));
        }
        let known = [qwen2_5_vl::ARCHITECTURES, qwen2::ARCHITECTURES].concat().join(", ");
        let found = checkpoint.architectures().map(str::to_owned).collect();
        Err(UnknownArchitecture { found, known }.into())
    }

    /// The numbers of the decoder.
    pub fn decoder(&self) -> &DecoderConfig {
        match self {
            FamilyConfig::Qwen2(config) => &config.decoder,
            FamilyConfig::Qwen2_5Vl(config) => &config.decoder,
        }
    }

    /// What serving it asks of a device. A family that brings something which no corner of the envelope stresses does not
    /// compile.
    pub fn strains(&self) -> &'static [Strain] {
        match self {
            FamilyConfig::Qwen2(_) => const { stressed(qwen2::STRAINS) },
            FamilyConfig::Qwen2_5Vl(_) => const { stressed(qwen2_5_vl::STRAINS) },
        }
    }

    /// Patches that become one token; none if the family takes no pictures.
    pub fn merged_patches(&self) -> Option<usize> {
        match self {
            FamilyConfig::Qwen2(_) => None,
            FamilyConfig::Qwen2_5Vl(config) => Some(config.vision.merged_patches()),
        }
    }

    /// What one patch covers; none if the family takes no pictures.
    pub fn patch(&self) -> Option<PatchSize> {
        match self {
            FamilyConfig::Qwen2(_) => None,
            FamilyConfig::Qwen2_5Vl(config) => Some(config.vision.patch()),
        }
    }

    /// The token that stands for pictures, if the family takes them.
    pub fn image_token(&self) -> Option<u32> {
        match self {
            FamilyConfig::Qwen2(_) => None,
            FamilyConfig::Qwen2_5Vl(config) => Some(config.image_token),
        }
    }

    /// Lets placeholders grow to the size of the pictures and videos that they stand for, and gives every token its
    /// position. A video takes one span a step.
    ///
    /// # Errors
    /// Placeholders of pictures or of videos are not as many as `visuals` has, or the family takes none.
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

    pub(crate) fn pack(&self, pictures: &[(&Patches, &[u32])]) -> PictureBatch {
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
