//! Registry of the model families: maps each checkpoint to the code of its family.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, LazyLock},
};

use bursar_budgets::Hint;
use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::patchify::PatchSize};
use serde_json::{Map, Value};
use thiserror::Error;

pub use crate::load_error::UnknownArchitecture;
use crate::{
    Depth, LoadError, MergeSize,
    blocks::{ConfigError, DecoderConfig, decoder::Decoder, draft_head::select_draft_head, vision::EmbeddingLayout},
    checkpoint::{Checkpoint, CheckpointOrigin, CheckpointSource, GgufArchitecture, GgufFile, RandomCheckpoint},
    error::CheckpointError,
    families::{
        Files, ReleasedShape, Settings, VisionSettings, Weights, draft_models, gemma3, gemma3_text, gemma4,
        gemma4_text, gemma4_unified, internvl, llama, qwen2, qwen2_5_vl, qwen2_vl, qwen3, qwen3_5, qwen3_5_text,
        qwen3_vl,
    },
    flow::{Grid, LayoutError, MediaGrid, PromptLayout, ResizedImage},
    nearest_names,
    processor::VideoProcessor,
    text::{PlaceholderTexts, Tokenizer, byte_level},
    weights::{WeightError, WeightMap},
    workload::{Workload, covered},
};

/// No shape has this name.
#[derive(Debug, Error)]
#[error("there is no shape {name:?}; the nearest names are {}", .nearest.join(", "))]
pub struct UnknownShape {
    pub name: String,
    pub nearest: Vec<&'static str>,
}

impl Hint for UnknownShape {
    type Text = String;

    fn hint(&self) -> String {
        "list all shapes with `bursar plan --shapes`".to_owned()
    }
}

/// Number of names that an error about an unknown shape lists.
const NEAREST_SHOWN: usize = 3;

/// A checkpoint with the settings and the vocabulary size of a released model, and random
/// weights. Use it to measure the speed and the memory of a model without downloading, for
/// example, 16 GB of files.
///
/// # Errors
/// [`UnknownShape`] if no shape has that name.
pub fn random_checkpoint(shape: &str, seed: u64) -> Result<RandomCheckpoint, UnknownShape> {
    let released = released_shape(shape)?;
    Ok(RandomCheckpoint::new(shape, seed, files(released, released.decoder().tokenizer())))
}

/// Like [`random_checkpoint`], but with a byte tokenizer, because building a tokenizer of the
/// model's size would take most of the time. Use this function for planning, which needs no
/// tokenizer.
///
/// # Errors
/// [`UnknownShape`] if no shape has that name.
pub fn shape_settings(shape: &str) -> Result<RandomCheckpoint, UnknownShape> {
    Ok(RandomCheckpoint::new(shape, 0, files(released_shape(shape)?, byte_level::tokenizer(0, &[]))))
}

fn released_shape(name: &str) -> Result<&'static dyn ReleasedShape, UnknownShape> {
    find_shape(name).ok_or_else(|| {
        let nearest = nearest_names(&name.to_lowercase(), shapes(), NEAREST_SHOWN);
        UnknownShape { name: name.to_owned(), nearest }
    })
}

fn files(shape: &dyn ReleasedShape, tokenizer: Vec<u8>) -> Files {
    let config = shape.config();
    let mut files = vec![("config.json", config.to_string().into_bytes())];
    files.extend(released_processors(&config).unwrap_or_default());
    files.extend(shape.decoder().text_files());
    files.push(("tokenizer.json", tokenizer));
    files
}

/// The checkpoint at `source` without its weights, for planning. `config.json` is required, and the
/// other files are used if they exist. A missing tokenizer is replaced by a byte tokenizer. A
/// missing file with processor settings is replaced by the file of the family's release.
///
/// # Errors
/// [`CheckpointError::MissingFile`] if there is no `config.json`; another [`CheckpointError`] if a
/// file cannot be read.
pub fn without_weights(source: CheckpointSource) -> Result<RandomCheckpoint, CheckpointError> {
    let config: Value = serde_json::from_slice(&source.require("config.json")?).unwrap_or_default();
    let mut files = vec![("tokenizer.json", byte_level::tokenizer(0, &[]))];
    files.extend(released_processors(&config).unwrap_or_default());
    Ok(RandomCheckpoint::over(source, files))
}

/// The GGUF file at `path` as the origin of a checkpoint. The file is not opened
/// yet: [`CheckpointOrigin::fetch`] opens it.
pub fn gguf(path: impl Into<PathBuf>) -> CheckpointOrigin {
    static KNOWN: LazyLock<Vec<GgufArchitecture>> = LazyLock::new(gguf_architectures);
    CheckpointOrigin::Gguf(path.into(), &KNOWN)
}

/// Opens the GGUF file at `path`.
///
/// # Errors
/// See [`GgufFile::open`].
pub fn open_gguf(path: &Path) -> Result<CheckpointSource, CheckpointError> {
    Ok(CheckpointSource::Gguf(Arc::new(GgufFile::open(path, &gguf_architectures())?)))
}

/// Generates the enums and functions that dispatch over the families. Each row has the variant and
/// the module of one family.
macro_rules! families {
    ($($(#[$doc:meta])* $name:ident: $folder:ident;)*) => {
        /// The configuration of a checkpoint, as its family reads `config.json`.
        #[derive(Clone, Debug, PartialEq)]
        pub enum FamilyConfig {
            $($(#[$doc])* $name($folder::Config),)*
        }

        pub(crate) enum Family {
            $($name($folder::Model),)*
        }

        /// Pictures packed for one launch, in the format of their family.
        #[derive(Clone, Debug, PartialEq)]
        pub struct EncoderBatch(Batch);

        #[derive(Clone, Debug, PartialEq)]
        enum Batch {
            $($name(<$folder::Model as Weights<$folder::Config>>::Batch),)*
        }

        impl EncoderBatch {
            /// Patches over all pictures.
            pub fn patches(&self) -> usize {
                match &self.0 {
                    $(Batch::$name(batch) => <$folder::Model as Weights<$folder::Config>>::patches(batch),)*
                }
            }

            /// Embeddings over all pictures.
            pub fn embeddings(&self) -> usize {
                match &self.0 {
                    $(Batch::$name(batch) => <$folder::Model as Weights<$folder::Config>>::embeddings(batch),)*
                }
            }
        }

        /// The names of all shapes that [`random_checkpoint`] accepts.
        pub fn shapes() -> impl Iterator<Item = &'static str> {
            [$(names::<$folder::Config>(),)*].concat().into_iter()
        }

        fn find_shape(name: &str) -> Option<&'static dyn ReleasedShape> {
            None$(.or_else(|| find_shape_of::<$folder::Config>(name)))*
        }

        /// See [`ReadText`](crate::families::ReadText).
        fn read_text(
            model_type: &str,
            place: &str,
            fields: &Map<String, Value>,
        ) -> Option<Result<DecoderConfig, ConfigError>> {
            None$(.or_else(|| <$folder::Config as Settings>::read_text(model_type, place, fields)))*
        }

        fn released_processors(config: &Value) -> Option<Files> {
            None$(.or_else(|| <$folder::Config as Settings>::released_processors(config)))*
        }

        /// The GGUF architectures of all families.
        fn gguf_architectures() -> Vec<GgufArchitecture> {
            [$(<$folder::Config as Settings>::GGUF,)*].concat()
        }

        /// Every architecture, with its `model_type`.
        fn architectures() -> Vec<(&'static str, &'static str)> {
            [$(<$folder::Config as Settings>::ARCHITECTURES,)*].concat()
        }

        impl FamilyConfig {
            /// Reads `config.json` with the family that serves one of its `architectures`.
            ///
            /// # Errors
            /// No family supports the architecture, the family does not support the configuration,
            /// the checkpoint's image processor belongs to another model, or the model has no draft
            /// head although one is [asked for](Checkpoint::with_draft_head).
            pub fn of(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
                $(if serves(checkpoint, <$folder::Config as Settings>::ARCHITECTURES)? {
                    let mut config = <$folder::Config as Settings>::read(checkpoint, read_text)?;
                    config.decoder_mut().limit_context(checkpoint.context_limit());
                    select_draft_head(config.decoder_mut(), checkpoint, draft_models::read)?;
                    return Ok(FamilyConfig::$name(config));
                })*
                Err(unknown(checkpoint).into())
            }

            /// The family's architecture in `config.json`; the first architecture if
            /// the family has several.
            pub fn architecture(&self) -> &'static str {
                match self {
                    $(FamilyConfig::$name(_) => <$folder::Config as Settings>::ARCHITECTURES[0].0,)*
                }
            }

            /// The checkpoint's video processor; `None` if the model takes no videos.
            pub fn video_processor(&self, checkpoint: &Checkpoint) -> Option<VideoProcessor> {
                match self {
                    $(FamilyConfig::$name(_) => <$folder::Config as Settings>::video_processor(checkpoint),)*
                }
            }

            pub fn decoder(&self) -> &DecoderConfig {
                match self {
                    $(FamilyConfig::$name(config) => config.decoder(),)*
                }
            }

            /// The workloads that serving this family puts on a device. A family does not compile
            /// if no worst case covers one of its workloads.
            pub fn workloads(&self) -> &'static [Workload] {
                match self {
                    $(FamilyConfig::$name(_) => const { covered(<$folder::Config as Settings>::WORKLOADS) },)*
                }
            }

            /// The texts that mark pictures and videos in a rendered prompt; `None` for
            /// a family without pictures.
            pub fn placeholder_texts(&self) -> Option<PlaceholderTexts> {
                match self {
                    $(FamilyConfig::$name(config) => config.placeholder_texts(),)*
                }
            }

            fn pictures(&self) -> Option<VisionSettings> {
                match self {
                    $(FamilyConfig::$name(config) => config.pictures(),)*
                }
            }

            /// Adds the family's text around the placeholders of pictures and videos to a rendered
            /// prompt. Families without such text return the prompt unchanged.
            pub fn write_visuals(&self, rendered: String, visuals: &[MediaGrid]) -> String {
                match self {
                    $(FamilyConfig::$name(config) => config.write_visuals(rendered, visuals),)*
                }
            }

            /// Expands each placeholder to one token per embedding of its picture or video, and
            /// gives every token its position. A video has one span per time step.
            ///
            /// # Errors
            /// The prompt has more or fewer placeholders than `visuals` has pictures or videos, or
            /// the family takes no pictures or videos.
            pub fn lay_out(&self, tokens: Vec<u32>, visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
                match self {
                    $(FamilyConfig::$name(config) => config.lay_out(tokens, visuals),)*
                }
            }

            pub(crate) fn claim(self, map: &mut WeightMap<'_>) -> Result<Family, WeightError> {
                Ok(match self {
                    $(FamilyConfig::$name(config) => {
                        Family::$name(<$folder::Model as Weights<$folder::Config>>::claim(config, map)?)
                    })*
                })
            }
        }

        impl Family {
            pub(crate) fn decoder(&self) -> &Decoder {
                match self {
                    $(Family::$name(model) => <$folder::Model as Weights<$folder::Config>>::decoder(model),)*
                }
            }

            pub(crate) fn pack(&self, of_ranks: &[Vec<(&ResizedImage, &[u32])>]) -> EncoderBatch {
                EncoderBatch(match self {
                    $(Family::$name(model) => {
                        Batch::$name(<$folder::Model as Weights<$folder::Config>>::pack(model, of_ranks))
                    })*
                })
            }

            /// # Panics
            /// If another family packed the batch, which would be a bug in Bursar.
            pub(crate) fn encode<B: Backend>(
                &self,
                scope: &Scope<'_, B>,
                batch: &EncoderBatch,
                cache: &mut Tensor<'_>,
                depth: Depth,
            ) -> Result<(), KernelError> {
                match (self, &batch.0) {
                    $((Family::$name(model), Batch::$name(batch)) => {
                        <$folder::Model as Weights<$folder::Config>>::encode(model, scope, batch, cache, depth)
                    })*
                    _ => panic!("pictures that another family packed"),
                }
            }
        }
    };
}

families! {
    /// Qwen2.5-VL: pictures, videos and text.
    Qwen2_5Vl: qwen2_5_vl;
    /// Qwen2-VL: pictures, videos and text.
    Qwen2Vl: qwen2_vl;
    /// Qwen3-VL: pictures, videos and text.
    Qwen3Vl: qwen3_vl;
    /// Qwen3.5, 3.6 and 3.8: pictures, videos and text.
    Qwen3_5: qwen3_5;
    /// Qwen3.5, 3.6 and 3.8: text only.
    Qwen3_5Text: qwen3_5_text;
    /// Qwen2 and Qwen2.5: text only.
    Qwen2: qwen2;
    /// Qwen3: text only.
    Qwen3: qwen3;
    /// Llama and models of the same architecture: text only.
    Llama: llama;
    /// InternVL 3 and 3.5: pictures, videos and text.
    InternVl: internvl;
    /// Gemma 3: pictures and text.
    Gemma3: gemma3;
    /// Gemma 3: text only.
    Gemma3Text: gemma3_text;
    /// Gemma 4: pictures, videos and text.
    Gemma4: gemma4;
    /// Gemma 4 12B, which has no vision tower: pictures, videos and text.
    Gemma4Unified: gemma4_unified;
    /// Gemma 4: text only.
    Gemma4Text: gemma4_text;
}

impl FamilyConfig {
    /// Checks that each id of the checkpoint's tokenizer has a row in this model's embedding. Added
    /// tokens may lack a row: some releases add a padding token without resizing the model.
    ///
    /// # Errors
    /// The tokenizer belongs to another model.
    pub fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<(), LoadError> {
        let (ids, rows) = (tokenizer.vocabulary_size(), self.decoder().vocabulary);
        let added = tokenizer.added_tokens();
        let is_added = |id: usize| added.binary_search_by_key(&id, |token| token.id as usize).is_ok();
        if !(rows..ids).all(is_added) {
            let message = format!("vocab_size is {rows}, but the tokenizer has {ids} ids");
            return Err(ConfigError::Contradiction(message).into());
        }
        Ok(())
    }

    /// How patches merge into tokens; `None` if the family takes no pictures.
    pub fn merge(&self) -> Option<MergeSize> {
        self.pictures().map(|pictures| pictures.merge)
    }

    /// Pixels and frames of one patch; `None` if the family takes no pictures.
    pub fn patch(&self) -> Option<PatchSize> {
        self.pictures().map(|pictures| pictures.patch)
    }

    /// The grid of each picture that the encoder processes, if all are tiles of the same size.
    pub fn tile(&self) -> Option<Grid> {
        self.pictures().and_then(|pictures| pictures.tile)
    }

    /// Tokens of the largest picture that a step must contain whole, if pictures have at most
    /// `picture_patches` patches. 0 if attention is causal, so that a step may end within a
    /// picture.
    pub fn whole_picture_tokens(&self, picture_patches: usize) -> usize {
        let Some(pictures) = self.pictures().filter(|_| self.decoder().step_format().whole_pictures) else { return 0 };
        pictures.merge.tokens(pictures.tile.map_or(picture_patches, |tile| tile.patches()))
    }

    /// The layout of a row of the vision cache. If the family takes no pictures, there is no such
    /// cache, and the row is as wide as the decoder.
    pub fn embedding_layout(&self) -> EmbeddingLayout {
        self.pictures().map_or(EmbeddingLayout::plain(self.decoder().hidden), |pictures| pictures.row)
    }

    /// Maximum number of text tokens that [`write_visuals`](Self::write_visuals) writes for each
    /// step of a video of usual length.
    pub fn step_text_tokens(&self) -> usize {
        self.pictures().map_or(0, |pictures| pictures.step_text_tokens)
    }

    /// The id of the placeholder token for pictures; `None` if the family takes no pictures.
    pub fn image_token(&self) -> Option<u32> {
        self.pictures().map(|pictures| pictures.token)
    }
}

fn names<S: Settings>() -> Vec<&'static str> {
    S::SHAPES.iter().map(ReleasedShape::name).collect()
}

fn find_shape_of<S: Settings>(name: &str) -> Option<&'static dyn ReleasedShape> {
    S::SHAPES.iter().find(|shape| shape.name() == name).map(|shape| shape as &dyn ReleasedShape)
}

fn unknown(checkpoint: &Checkpoint) -> UnknownArchitecture {
    let mut found: Vec<_> = checkpoint.architectures().map(str::to_owned).collect();
    if found.is_empty() {
        found.extend(checkpoint.model_type().map(str::to_owned));
    }
    let known: Vec<_> = architectures().into_iter().map(|(architecture, _)| architecture).collect();
    UnknownArchitecture { found, known: group_by_suffix(&known) }
}

/// The architectures grouped by suffix, as in `{Qwen2, Llama}ForCausalLM`, because a list of all names
/// would be too long for an error.
fn group_by_suffix(architectures: &[&str]) -> String {
    const SUFFIXES: [&str; 2] = ["ForConditionalGeneration", "ForCausalLM"];
    let groups = SUFFIXES.map(|suffix| {
        let names: Vec<_> = architectures.iter().filter_map(|name| name.strip_suffix(suffix)).collect();
        format!("{{{}}}{suffix}", names.join(", "))
    });
    let others = architectures.iter().filter(|name| !SUFFIXES.iter().any(|suffix| name.ends_with(suffix)));
    let all: Vec<_> = groups.iter().map(String::as_str).chain(others.copied()).collect();
    all.join(", ")
}

/// Whether a family with the architectures `known` serves the checkpoint. If `config.json` has no
/// `architectures`, its `model_type` decides, as in transformers (5.17,
/// `models/auto/configuration_auto.py`). If the file has both keys, they must agree.
fn serves(checkpoint: &Checkpoint, known: &[(&str, &str)]) -> Result<bool, ConfigError> {
    if checkpoint.architectures().next().is_none() {
        return Ok(known.iter().any(|(_, model_type)| checkpoint.model_type() == Some(model_type)));
    }
    let served = |name: &str| known.iter().find(|(architecture, _)| *architecture == name);
    let Some((name, model_type)) = checkpoint.architectures().find_map(served) else { return Ok(false) };
    match checkpoint.model_type() {
        Some(other) if other != *model_type => {
            Err(ConfigError::Contradiction(format!("architectures names {name}, but model_type is {other}")))
        }
        _ => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_of_a_released_shape_has_a_vocabulary_row() {
        for name in shapes() {
            let decoder = released_shape(name).expect("a known shape").decoder();
            assert!(decoder.words + decoder.text.control.len() <= decoder.vocabulary, "{name}");
        }
    }
}
