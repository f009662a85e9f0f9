//! What a family tells the registry. A family implements [`Settings`] for its `config.json` and [`Weights`] for its
//! model, and is a row there. Passes are generic over the backend, so the registry makes enums of the rows.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::patchify::PatchSize};
use serde_json::{Map, Value};

use crate::{
    Depth, MergeSize,
    blocks::{
        ConfigError,
        decoder::{Decoder, DecoderConfig},
        decoder_shape::DecoderShape,
        vision::EmbeddingLayout,
    },
    checkpoint::{Checkpoint, GgufArchitecture},
    flow::{Grid, LayoutError, MediaGrid, POSITION_AXES, PromptLayout, ResizedImage},
    processor::VideoProcessor,
    text::PlaceholderTexts,
    weights::{WeightError, WeightMap},
    workload::Workload,
};

/// The files of a checkpoint, by name, without the weights.
pub type Files = Vec<(&'static str, Vec<u8>)>;

/// The sizes of a released model, without its weights.
pub trait ReleasedShape: 'static {
    /// The name that [`random_checkpoint`](crate::registry::random_checkpoint) takes.
    fn name(&self) -> &'static str;

    /// Its text model.
    fn decoder(&self) -> &DecoderShape;

    /// The files of its checkpoint that are not about text: the configuration and the processors'.
    fn files(&self) -> Files;
}

/// What a family with pictures says about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionSettings {
    /// How patches merge into tokens.
    pub merge: MergeSize,
    /// Pixels and frames of a patch.
    pub patch: PatchSize,
    /// The placeholder token.
    pub token: u32,
    /// What the tower leaves in the vision cache for each token.
    pub row: EmbeddingLayout,
    /// Tokens of text that [`Settings::write_visuals`] writes for each step of a video; 0 if it writes none.
    pub step_text_tokens: usize,
    /// The grid of each picture that the encoder sees, if all are tiles of one size.
    pub tile: Option<Grid>,
}

/// Reads a part of `config.json` that describes a text model, by its `model_type`, whichever family serves that. The
/// second argument is the prefix of its keys in messages. `None` if no family does.
pub type ReadText = fn(&str, &str, &Map<String, Value>) -> Option<Result<DecoderConfig, ConfigError>>;

/// A family's configuration.
pub trait Settings: Sized {
    /// `architectures` entries that the family serves, each with its `model_type`.
    const ARCHITECTURES: &'static [(&'static str, &'static str)];

    /// What its GGUF files say they are; none if they are not read.
    const GGUF: &'static [GgufArchitecture] = &[];

    /// The kinds of work that serving it puts on a device. By default those of a family without pictures.
    const WORKLOADS: &'static [Workload] = &[Workload::Prefill, Workload::Decode, Workload::Score, Workload::Choose];

    /// A released size of the family.
    type Shape: ReleasedShape;

    /// Its released sizes.
    const SHAPES: &'static [Self::Shape];

    /// Reads `config.json`, and checks the checkpoint's processors against it. `text` reads the part of a text model
    /// that is another family's.
    fn read(checkpoint: &Checkpoint, text: ReadText) -> Result<Self, ConfigError>;

    /// As [`ReadText`], for the family's own text model.
    fn read_text(
        _model_type: &str,
        _place: &str,
        _fields: &Map<String, Value>,
    ) -> Option<Result<DecoderConfig, ConfigError>> {
        None
    }

    /// The checkpoint's processor of videos; `None` if it has none, and then it takes pictures alone. By default the
    /// settings of pictures describe videos as well where there are no others.
    fn video_processor(checkpoint: &Checkpoint) -> Option<VideoProcessor> {
        checkpoint.video_processor.clone()
    }

    /// The decoder's sizes.
    fn decoder(&self) -> &DecoderConfig;

    /// None for a family without pictures.
    fn pictures(&self) -> Option<VisionSettings> {
        None
    }

    /// Writes pictures and videos into a rendered prompt before it is encoded, in a family whose prompts have more text
    /// for them than their placeholders.
    fn write_visuals(&self, rendered: String, _visuals: &[MediaGrid]) -> String {
        rendered
    }

    /// The texts that mark pictures and videos in a rendered prompt; `None` for a family without pictures. Users cannot
    /// write them, and templates that join strings get them.
    fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
        None
    }

    /// Expands each placeholder to one token per embedding of its picture or video, and gives every token its position.
    fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        match visuals.len() {
            0 => Ok(text_layout(tokens)),
            pictures => Err(LayoutError::TextOnly { pictures }),
        }
    }

    /// The files of the released processors of pictures and videos for this `config.json`, if it is the family's.
    fn released_processors(_config: &Value) -> Option<Files> {
        None
    }
}

/// A family's model.
pub trait Weights<S: Settings>: Sized {
    /// Pictures packed for one launch.
    type Batch: Clone + std::fmt::Debug + PartialEq;

    /// Claims the model's weights.
    fn claim(settings: S, map: &mut WeightMap<'_>) -> Result<Self, WeightError>;

    /// Its decoder.
    fn decoder(&self) -> &Decoder;

    /// Packs the pictures of each rank, each with the rows of the vision cache for its embeddings. With one entry, every
    /// rank encodes its pictures.
    fn pack(&self, of_ranks: &[Vec<(&ResizedImage, &[u32])>]) -> Self::Batch;

    /// Patches over all pictures of a batch.
    fn patches(batch: &Self::Batch) -> usize;

    /// Embeddings over all pictures of a batch.
    fn embeddings(batch: &Self::Batch) -> usize;

    /// Writes the [`EmbeddingLayout`]s of a batch to `cache` `[rows, width]`.
    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &Self::Batch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError>;
}

/// The model of a family without pictures: a decoder, whose weights released checkpoints name `model.*`.
pub struct TextModel(Decoder);

/// A family without pictures packs none.
#[derive(Clone, Debug, PartialEq)]
pub struct NoPictures;

impl<S: Settings> Weights<S> for TextModel {
    type Batch = NoPictures;

    fn claim(settings: S, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        Ok(TextModel(Decoder::claim(settings.decoder().clone(), "model", map)?))
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

/// Numbers the tokens' positions from 0, the same on all axes.
fn text_layout(tokens: Vec<u32>) -> PromptLayout {
    let positions = (0..tokens.len() as u32).map(|position| [position; POSITION_AXES]).collect();
    PromptLayout { next_position: tokens.len() as u32, tokens, positions, pictures: Vec::new() }
}
