//! Weights of 4 or 8 bits: integers in the formats of AWQ, GPTQ and compressed-tensors, and FP4
//! numbers in the formats of compressed-tensors and ModelOpt.
//!
//! A file stores such a weight as several tensors of a module: packed elements, scales, zero
//! points, and sometimes the group of each column. [`TensorIndex`](super::TensorIndex) presents
//! them as one tensor `module.weight` `[out_features, in_features]`, or `module`
//! `[experts, out_features, in_features]`, so that no other code depends on the names of these
//! tensors. `scheme` describes the format of a weight. `names` and `axes` describe the names and
//! the shapes of its tensors. `parts` finds and checks the tensors of a module. `matrix` and
//! `scale` read the numbers.

mod axes;
mod matrix;
mod names;
mod parts;
mod scale;
mod scheme;

pub use matrix::PackedMatrix;
pub(super) use names::PackedModule;
pub(super) use parts::PackedParts;
pub use scheme::{PackedFormat, PackedScheme};
