//! A checkpoint whose tensors are not what its configuration says, or what a target or a rank can take.

use bursar_kernels::DType;
use thiserror::Error;

use crate::checkpoint::error::CheckpointError;

/// A tensor of the checkpoint that does not match the model's configuration.
#[derive(Debug, Error)]
pub enum WeightError {
    /// It is missing, or the file is broken.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its shape differs from the configuration's.
    #[error("tensor {name} has shape {found:?}, but config.json asks for {expected:?}")]
    Shape {
        /// The tensor's name.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The file has tensors that the model has no place for: file and configuration are of different models.
    #[error("config.json names no layer for {count} tensors of the checkpoint: {}", .first.join(", "))]
    Extra {
        /// The number of such tensors.
        count: usize,
        /// The first three names, in alphabetical order.
        first: Vec<String>,
    },
    /// The configuration ties two tensors, but the file has both with different values.
    #[error("config.json ties {name} to {twin}, but the checkpoint has both with different values")]
    Untied {
        /// The tensor that would not be read.
        name: String,
        /// The tensor that would be read in its place.
        twin: String,
    },
    /// The target cannot compute what the model consists of.
    #[error("{what} are not supported on {target} yet")]
    Unserved {
        /// The part of the model.
        what: &'static str,
        /// The target's name.
        target: &'static str,
    },
    /// A tensor's type is not what the checkpoint's configuration of FP8 says.
    #[error("tensor {name} holds {found}, but {expected}")]
    Format {
        /// The tensor's name.
        name: String,
        /// What the configuration says, in words.
        expected: &'static str,
        /// The type in the file.
        found: DType,
    },
    /// A tensor in FP8 that is served plain only, whatever its configuration says.
    #[error("tensor {name} holds {found}, but embeddings, lm_head, norms and routers must not be quantized")]
    AlwaysPlain {
        /// The tensor's name.
        name: String,
        /// The type in the file.
        found: DType,
    },
    /// Some of the projections that are computed together are FP8, others plain.
    #[error("the checkpoint's quantization_config has {name} in FP8 and {other} not, but they are computed as one")]
    PartlyQuantized {
        /// One that is FP8.
        name: String,
        /// One that is not.
        other: String,
    },
    /// A scale of FP8 numbers that cannot be one.
    #[error("{name} holds the scale {value}; expected {expected}")]
    Scale {
        /// The tensor's name.
        name: String,
        /// The number.
        value: f32,
        /// What a scale is, in words.
        expected: &'static str,
    },
    /// Scales of FP8 numbers that are more or fewer than those numbers ask for.
    #[error("the scales {name} have shape {found:?}, but quantization_config asks for {expected:?}")]
    ScaleShape {
        /// The tensor's name.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A layer in FP8 whose outputs are scaled, as InternVL's tower has them.
    #[error(
        "{name} is FP8 and its outputs are multiplied by {scale}; this is supported only for weights that are not \
         quantized"
    )]
    ScaledFp8 {
        /// The layer's name.
        name: String,
        /// The name of what its outputs are multiplied by.
        scale: String,
    },
    /// A scale of queries or probabilities in FP8.
    #[error("{name} is a scale of FP8 queries or probabilities, but attention computes these in a wider type")]
    AttentionScale {
        /// The tensor's name.
        name: String,
    },
    /// Tensors that are fused have different element types.
    #[error("tensor {name} holds {found}, but the tensors computed with it hold {expected}")]
    Mixed {
        /// The tensor's name.
        name: String,
        /// The first neighbour's type.
        expected: DType,
        /// This tensor's type.
        found: DType,
    },
    /// A rank's share does not end where numbers of the file do that only exist together.
    #[error("tensor {name} would be split at {at}, but its {what} cannot be split within {unit}")]
    Cut {
        /// The tensor's name.
        name: String,
        /// The row or column.
        at: usize,
        /// The numbers that exist together.
        what: &'static str,
        /// How many of them.
        unit: usize,
    },
    /// So many ranks cannot share the model out.
    #[error(transparent)]
    Ranks(#[from] RanksError),
}

/// A model that so many ranks cannot share out.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{what} cannot be divided among {ranks} ranks: there are {count}")]
pub struct RanksError {
    /// How many ranks were asked for.
    pub ranks: usize,
    /// What does not divide.
    pub what: &'static str,
    /// How many of it there are.
    pub count: usize,
    /// Numbers of ranks that can share out all of it.
    pub possible: Vec<usize>,
}
