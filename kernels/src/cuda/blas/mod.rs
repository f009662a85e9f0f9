//! cuBLASLt, loaded at run time, so that the same binary runs with and without it.

mod library;
mod products;
mod search;

pub(super) use library::Blas;
pub(super) use products::{Described, FEW_ROWS, GemmAlgorithm, GemmOperands, GemmProblem, LaneGemms, QuantScheme};
pub use search::BlasSearch;
