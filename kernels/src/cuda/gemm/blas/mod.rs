//! cuBLASLt, loaded at run time, so that the same binary runs with and without it.

mod lane;
mod library;

pub(in crate::cuda) use lane::{BlasLane, Described, LaneGemms};
pub(in crate::cuda) use library::{Algorithm, Blas};
