//! Weights of 4 or 8 bits in the formats of AWQ, GPTQ and compressed-tensors.
//!
//! A file stores such a weight as several tensors of a module: packed integers, scales, zero
//! points, and sometimes the group of each column. [`TensorIndex`](super::TensorIndex) presents
//! them as one tensor `module.weight` `[out_features, in_features]`, so that no other code depends
//! on the names of these tensors. `scheme` describes the format of a weight, `parts` finds and
//! checks the tensors of a module, and `matrix` reads the elements.

mod matrix;
mod parts;
mod scheme;

pub use matrix::PackedMatrix;
pub(super) use parts::PackedParts;
pub use scheme::{PackedFormat, PackedScheme};
