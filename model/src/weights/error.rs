//! Errors about tensors of a checkpoint that do not match its configuration, or that a target or
//! a rank cannot use.

use bursar_budgets::Hint;
use bursar_kernels::DType;
use thiserror::Error;

use crate::checkpoint::error::CheckpointError;

/// A tensor of the checkpoint that does not match the model's configuration, or that the target or
/// a rank cannot use.
#[derive(Debug, Error)]
pub enum WeightError {
    /// The tensor is missing, or the file is damaged.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The tensor's shape differs from the configuration.
    #[error("tensor {name} has shape {found:?}, but config.json asks for {expected:?}")]
    Shape {
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The file has tensors that no layer of the model reads: the file and the configuration
    /// belong to different models.
    #[error("config.json names no layer for {count} tensors of the checkpoint: {}", .first.join(", "))]
    Extra {
        /// The number of such tensors.
        count: usize,
        /// The first three names, in alphabetical order.
        first: Vec<String>,
    },
    /// The configuration ties two tensors, but the file has both with different values.
    #[error("config.json ties {name} to {tied_to}, but the checkpoint has both with different values")]
    Untied {
        /// The tensor that would not be read.
        name: String,
        /// The tensor that would be read in its place.
        tied_to: String,
    },
    /// The draft head is to be loaded, but the checkpoint does not have its tensors.
    #[error("the checkpoint has no draft head: no tensor is named {module}.*, although config.json has its settings")]
    NoDraftHead { module: &'static str },
    /// The target does not support a part of the model.
    #[error("{what} are not supported on {target} yet")]
    Unsupported {
        /// The part of the model.
        what: &'static str,
        target: &'static str,
    },
    /// The output projection cannot be rounded for the draft head, although the user asks for it.
    #[error("the draft head cannot have an output projection in 4-bit integers on {target}: {reason}")]
    DraftProjection { reason: &'static str, target: &'static str },
    /// A draft model's reduced vocabulary has a token that the model does not have.
    #[error("{name} adds {difference} to the index {index}; expected a token id from 0 to {}", .vocabulary - 1)]
    DraftId { name: String, index: usize, difference: i64, vocabulary: usize },
    /// A list that must have each token id once has a duplicate, or an id outside the vocabulary.
    #[error("{name} has {id} at index {index}; expected each token id from 0 to {} exactly once", .vocabulary - 1)]
    TokenId { name: String, index: usize, id: i64, vocabulary: usize },
    /// A tensor's type contradicts the checkpoint's `quantization_config`.
    #[error("tensor {name} holds {found}, but {expected}")]
    Format {
        name: String,
        /// The requirement of the configuration, in words.
        expected: &'static str,
        /// The type in the file.
        found: DType,
    },
    /// A tensor is quantized, but this tensor is supported only without quantization,
    /// regardless of the configuration.
    #[error("tensor {name} holds {found}, but embeddings, lm_head, norms and routers must not be quantized")]
    AlwaysPlain {
        name: String,
        /// The type in the file.
        found: DType,
    },
    /// A projection is quantized, but another projection that is computed together with it is not.
    #[error("the checkpoint's quantization_config quantizes {name} and not {other}, but they are computed as one")]
    PartlyQuantized {
        /// A projection that is quantized.
        name: String,
        /// A projection that is not quantized.
        other: String,
    },
    /// A scale of quantized numbers has a value that is not valid.
    #[error("{name} holds the scale {value}; expected {expected}")]
    Scale {
        name: String,
        value: f32,
        /// The requirement for a scale, in words.
        expected: &'static str,
    },
    /// A column of a packed weight belongs to a group that does not exist.
    #[error("tensor {name} has column {column} in group {group}, but its groups are 0 to {}", .groups - 1)]
    Group { name: String, column: usize, group: i32, groups: usize },
    /// The number of scales does not match the quantized numbers.
    #[error("the scales {name} have shape {found:?}, but quantization_config asks for {expected:?}")]
    ScaleShape {
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A layer is quantized and its outputs are scaled, as in InternVL's vision tower.
    #[error(
        "{name} is quantized and its outputs are multiplied by {scale}; this is supported only for weights that are \
         not quantized"
    )]
    ScaledOutputs {
        name: String,
        /// The name of the tensor that its outputs are multiplied by.
        scale: String,
    },
    /// The checkpoint has a scale for quantized queries or attention probabilities.
    #[error("{name} is a scale of quantized queries or probabilities, but attention computes these in a wider type")]
    AttentionScale { name: String },
    /// Tensors that are fused have different element types.
    #[error("tensor {name} holds {found}, but the tensors computed with it hold {expected}")]
    Mixed {
        name: String,
        /// The type of the first fused tensor.
        expected: DType,
        found: DType,
    },
    /// A rank's shard begins or ends within a group of numbers that cannot be
    /// separated in the file.
    #[error("tensor {name} would be split at {at}, but its {what} cannot be split within {unit}")]
    Cut {
        name: String,
        /// The row or column of the split.
        at: usize,
        /// The kind of numbers that cannot be separated.
        what: &'static str,
        /// Number of rows or columns that form a group.
        unit: usize,
    },
    /// The model cannot be divided among this many ranks.
    #[error(transparent)]
    Ranks(#[from] RanksError),
}

impl WeightError {
    /// The error for a tensor of the wrong type `found`. `is_quantized` is `true` if the tensor
    /// should be quantized.
    pub(super) fn unexpected_format(name: &str, found: DType, is_quantized: bool) -> Self {
        let expected = if is_quantized {
            "quantization_config says that it is quantized"
        } else {
            "quantization_config says that it is not quantized"
        };
        WeightError::Format { name: name.to_owned(), expected, found }
    }
}

impl Hint for WeightError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            WeightError::Checkpoint(error) => error.hint(),
            WeightError::Ranks(error) => {
                let possible: Vec<_> = error.possible.iter().map(ToString::to_string).collect();
                format!("use one of these numbers of ranks: {}", possible.join(", "))
            }
            WeightError::NoDraftHead { module } => format!(
                "load the original release (transformers drops the `{module}.*` tensors when it saves a model), or set \
                 draft_method to ngram or none"
            ),
            WeightError::Cut { .. } => "use fewer ranks, or a checkpoint that is not quantized".to_owned(),
            WeightError::DraftProjection { .. } => "leave draft_quantization out, or set it to none".to_owned(),
            WeightError::Unsupported { .. } => {
                "leave quantization out if it is set, load another checkpoint of the model, or load it on a CPU"
                    .to_owned()
            }
            WeightError::Format { .. } | WeightError::PartlyQuantized { .. } => {
                "check quantization_config and its list of modules that are not quantized against the checkpoint's \
                 release"
                    .to_owned()
            }
            WeightError::ScaledOutputs { .. } | WeightError::AlwaysPlain { .. } => {
                "load a release in which it is not quantized, or load one in bf16 with the option `quantization`"
                    .to_owned()
            }
            WeightError::ScaleShape { .. } => {
                "check quantization_config, which says how many numbers share a scale, against the checkpoint's release"
                    .to_owned()
            }
            WeightError::AttentionScale { .. } => {
                "load a release that has scales only of keys and values, or remove the scales of queries and \
                 probabilities from the file: the weights do not need them"
                    .to_owned()
            }
            WeightError::Scale { .. }
            | WeightError::Group { .. }
            | WeightError::DraftId { .. }
            | WeightError::TokenId { .. } => {
                "download the file again; it is damaged or was quantized wrongly".to_owned()
            }
            WeightError::Extra { .. } => {
                "check config.json against the checkpoint's release; a tensor that no layer reads is an error here, \
                 though other runtimes may ignore it"
                    .to_owned()
            }
            WeightError::Untied { name, .. } => {
                format!("set `tie_word_embeddings` to false if {name} is the model's own, or remove it from the file")
            }
            WeightError::Shape { .. } | WeightError::Mixed { .. } => {
                "download the checkpoint again; the folder mixes files of different \
                                      checkpoints"
                    .to_owned()
            }
        }
    }
}
/// The model cannot be divided among the requested number of ranks.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{what} cannot be divided among {ranks} ranks: there are {count}")]
pub struct RanksError {
    /// The requested number of ranks.
    pub ranks: usize,
    /// The parts that cannot be divided, for example query heads.
    pub what: &'static str,
    /// The number of these parts.
    pub count: usize,
    /// Numbers of ranks among which the model can be divided.
    pub possible: Vec<usize>,
}
