//! Loading of a checkpoint's tensors into one segment of device memory.
//!
//! The code of a family *claims* its weights: their names, their shapes, and which weights are
//! fused. The claims determine the segment's size without reading a weight. The same claims, made
//! again for a real segment, determine the source and the destination of each copy.
//!
//! A [`WeightMap`] records the claims. `projections`, `experts`, `quantized_weight`, `block_rows`,
//! `int4` and `cache_scales` add methods to the map. The map consists of the segment's layout, the
//! formats of the checkpoint's modules, and the names of the tensors that are read. `upload` makes
//! the copies of a map.

mod block_rows;
mod cache_scales;
mod copy;
mod cut;
mod dequantizing;
mod error;
mod experts;
mod int4;
mod linear;
mod map;
mod module_formats;
mod projections;
mod quantized_numbers;
mod quantized_weight;
mod rounding;
mod routing_skew;
mod scaling;
mod segment_layout;
mod swapping;
mod tensor_names;
mod unpacking;
mod upload;

pub use block_rows::BlockWeights;
pub use copy::{ComputedScales, Int4Copy, NormScaling, SpreadScales, WeightCopy, WeightSource};
pub use cut::Cut;
pub use error::{RanksError, WeightError};
pub use linear::Linear;
pub use map::WeightMap;
pub use routing_skew::RoutingSkew;
pub(crate) use upload::upload;
