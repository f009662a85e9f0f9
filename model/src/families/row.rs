//! Interface between a family and the registry. A family implements [`Settings`] for its
//! `config.json` and [`Weights`] for its model, and is one row of the registry. The registry
//! generates enums from its rows instead of using trait objects, because forward passes are
//! generic over the backend.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::patchify::PatchSize};
use serde_json::{Map, Value};

use crate::{
    Depth, MergeSize,
    blocks::{ConfigError, DecoderConfig, decoder::Decoder, decoder_shape::DecoderShape, vision::EmbeddingLayout},
    checkpoint::{Checkpoint, GgufArchitecture},
    flow::{Grid, LayoutError, MediaGrid, POSITION_AXES, PromptLayout, ResizedImage},
    processor::VideoProcessor,
    text::PlaceholderTexts,
    weights::{WeightError, WeightMap},
    workload::Workload,
};

pub use crate::checkpoint::NamedFiles as Files;

/// Sizes of a released model, without its weights.
pub trait ReleasedShape: 'static {
    /// The name that [`random_checkpoint`](crate::registry::random_checkpoint) takes.
    fn name(&self) -> &'static str;

    fn decoder(&self) -> &DecoderShape;

    /// The contents of `config.json`.
    fn config(&self) -> Value;
}

/// Shape type of a family that has no released shapes.
pub enum NoShape {}

impl ReleasedShape for NoShape {
    fn name(&self) -> &'static str {
        match *self {}
    }

    fn decoder(&self) -> &DecoderShape {
        match *self {}
    }

    fn config(&self) -> Value {
        match *self {}
    }
}

/// Vision settings of a family that accepts pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionSettings {
    /// How patches merge into tokens.
    pub merge: MergeSize,
    /// Pixels and frames of a patch.
    pub patch: PatchSize,
    pub token: u32,
    /// Layout of the vision cache row that the tower writes for each token.
    pub row: EmbeddingLayout,
    /// Maximum number of text tokens that [`Settings::write_visuals`] writes for each step of a
    /// video of usual length. 0 for a family without such tokens.
    pub step_text_tokens: usize,
    /// Grid of each picture that the encoder processes, if all are tiles of one size.
    pub tile: Option<Grid>,
}

/// Reads a part of `config.json` that describes a text model, with the family that handles its
/// `model_type`. The arguments are the `model_type`, the prefix of the part's keys in error
/// messages, and the part. Returns `None` if no family handles this `model_type`.
pub type ReadText = fn(&str, &str, &Map<String, Value>) -> Option<Result<DecoderConfig, ConfigError>>;

/// Configuration of a family, read from `config.json`.
pub trait Settings: Sized {
    /// Supported entries of `architectures`, each with its `model_type`.
    const ARCHITECTURES: &'static [(&'static str, &'static str)];

    /// Architectures in the GGUF files of this family; empty if GGUF files of the family are not
    /// supported.
    const GGUF: &'static [GgufArchitecture] = &[];

    /// Workloads that serving the family puts on a GPU. The default is for a family without
    /// pictures.
    const WORKLOADS: &'static [Workload] =
        &[Workload::Prefill, Workload::Decode, Workload::Verify, Workload::Score, Workload::Choose];

    /// Checkpoint modules that this family ignores.
    const UNUSED_MODULES: &'static [&'static str] = &[];

    type Shape: ReleasedShape;

    const SHAPES: &'static [Self::Shape];

    /// Reads `config.json` and checks the checkpoint's processors against it. `text` reads the
    /// settings of a text model that belongs to another family.
    fn read(checkpoint: &Checkpoint, text: ReadText) -> Result<Self, ConfigError>;

    /// Like [`ReadText`], but reads only this family's text model.
    fn read_text(
        _model_type: &str,
        _place: &str,
        _fields: &Map<String, Value>,
    ) -> Option<Result<DecoderConfig, ConfigError>> {
        None
    }

    /// Video processor of the checkpoint; `None` if the model takes no videos. By default, the
    /// picture settings also describe videos if there are no separate video settings.
    fn video_processor(checkpoint: &Checkpoint) -> Option<VideoProcessor> {
        checkpoint.video_processor.clone()
    }

    fn decoder(&self) -> &DecoderConfig;

    fn decoder_mut(&mut self) -> &mut DecoderConfig;

    /// The family's vision settings; `None` for a family without pictures.
    fn pictures(&self) -> Option<VisionSettings> {
        None
    }

    /// Writes pictures and videos into a rendered prompt before the prompt is tokenized, for a
    /// family whose prompts have text around placeholders.
    fn write_visuals(&self, rendered: String, _visuals: &[MediaGrid]) -> String {
        rendered
    }

    /// Texts that mark pictures and videos in a rendered prompt; `None` for a family without
    /// pictures. The same texts in a user's message do not mark a picture or a video. A chat
    /// template that does not support pictures receives messages in which these texts replace
    /// pictures and videos.
    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        None
    }

    /// Expands each placeholder to one token per embedding of its picture or video, and gives
    /// every token its position.
    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        match visuals.len() {
            0 => Ok(text_layout(tokens)),
            pictures => Err(LayoutError::TextOnly { pictures }),
        }
    }

    /// Settings files of the released picture and video processors for this `config.json`. `None`
    /// if the configuration belongs to another family.
    fn released_processors(_config: &Value) -> Option<Files> {
        None
    }
}

/// Model of a family: its weights and its forward passes.
pub trait Weights<S: Settings>: Sized {
    /// Pictures packed for one launch.
    type Batch: Clone + std::fmt::Debug + PartialEq;

    fn claim(settings: S, map: &mut WeightMap<'_>) -> Result<Self, WeightError>;

    fn decoder(&self) -> &Decoder;

    /// Packs the pictures of each rank, each with the rows of the vision cache for its embeddings.
    /// If there is only one entry, every rank encodes the pictures of that entry.
    fn pack(&self, of_ranks: &[Vec<(&ResizedImage, &[u32])>]) -> Self::Batch;

    /// Patches of all pictures of a batch.
    fn patches(batch: &Self::Batch) -> usize;

    /// Embeddings of all pictures of a batch.
    fn embeddings(batch: &Self::Batch) -> usize;

    /// Encodes a batch and writes one row per embedding to `cache` `[rows, width]`.
    /// [`EmbeddingLayout`] describes the columns of a row.
    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &Self::Batch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError>;
}

/// Model of a family without pictures: a decoder. Its weights are named `model.*` in released
/// checkpoints.
pub struct TextModel(Decoder);

/// Batch type of a family without pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct NoPictures;

impl<S: Settings> Weights<S> for TextModel {
    type Batch = NoPictures;

    fn claim(settings: S, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        // Text-only exports of models with pictures keep their longer names.
        let has_decoder = |prefix: &&str| map.has(&format!("{prefix}.embed_tokens.weight"));
        let prefix = ["model.language_model", "language_model.model"].into_iter().find(has_decoder).unwrap_or("model");
        S::UNUSED_MODULES.iter().for_each(|module| map.leave_unread(module));
        Ok(TextModel(Decoder::claim(settings.decoder().clone(), prefix, map)?))
    }

    fn decoder(&self) -> &Decoder {
        &self.0
    }

    fn pack(&self, _: &[Vec<(&ResizedImage, &[u32])>]) -> NoPictures {
        panic!("a text-only family was given pictures; lay_out refuses them")
    }

    fn patches(_: &NoPictures) -> usize {
        0
    }

    fn embeddings(_: &NoPictures) -> usize {
        0
    }

    fn encode<B: Backend>(
        &self,
        _: &Scope<'_, B>,
        _: &NoPictures,
        _: &mut Tensor<'_>,
        _: Depth,
    ) -> Result<(), KernelError> {
        panic!("a text-only family packs no pictures")
    }
}

/// Lays out a prompt without pictures: positions count from 0 and are equal on all axes.
fn text_layout(tokens: Vec<u32>) -> PromptLayout {
    let positions = (0..tokens.len() as u32).map(|position| [position; POSITION_AXES]).collect();
    PromptLayout { next_position: tokens.len() as u32, tokens, positions, pictures: Vec::new() }
}
