//! From a checkpoint's tensors to one segment of device memory.
//!
//! A family *claims* its weights once: names, shapes, and which of them the kernels want side by side. The claims give
//! the segment's size without reading a weight; the same claims, made again over a real segment, say what is copied
//! where.

mod linear;
mod map;
mod rounding;

pub use linear::Linear;
pub(crate) use map::dtype;
pub use map::{WeightCopy, WeightError, WeightMap, WeightSource};
pub(crate) use rounding::{room_for, rounded_parts};
