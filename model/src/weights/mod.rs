//! From a checkpoint's tensors to one segment of device memory.
//!
//! The code of a family *claims* its weights: their names, their shapes, and which ones are fused. The claims give the
//! segment's size without reading a weight. Made again over a real segment, the same claims say what is copied where.

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
pub(crate) use rounding::{room_for, rounded_parts};
pub use routing_skew::RoutingSkew;
pub(crate) use scaling::scaled_parts;
pub(crate) use swapping::swapped_parts;
pub(crate) use unpacking::unpacked_parts;
