//! Captured graphs of decoding: which sizes there are, and how their inputs lie. The lane that captured them replays them
//! (`lane/graphs.rs`); what pays for them is with the rest of an engine's memory.

mod captured;
mod core;
mod shape;

pub use captured::Captured;
pub use core::buckets;
pub use shape::GraphShape;
