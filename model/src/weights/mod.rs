//! Loading of a checkpoint's tensors into one segment of device memory.
//!
//! The code of a family *claims* its weights: their names, their shapes, and which weights are
//! fused. The claims determine the segment's size without reading a weight. The same claims, made
//! again for a real segment, determine the source and the destination of each copy.

mod blocks;
mod copy;
mod cut;
mod error;
mod fp8_claims;
mod fp8_rounding;
mod linear;
mod map;
mod rounding;
mod routing_skew;
mod scaling;
mod swapping;
mod unpacking;

pub use copy::{MadeScales, SpreadScales, WeightCopy, WeightSource};
pub use cut::Cut;
pub use error::{RanksError, WeightError};
pub(crate) use fp8_claims::spread;
pub(crate) use fp8_rounding::rounded_to_fp8;
pub use linear::Linear;
pub use map::WeightMap;
pub(crate) use map::dtype;
pub(crate) use rounding::{buffer_for, rounded_parts};
pub use routing_skew::RoutingSkew;
pub(crate) use scaling::scaled_parts;
pub(crate) use swapping::swapped_parts;
pub(crate) use unpacking::unpacked_parts;
