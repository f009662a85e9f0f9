//! Captured CUDA graphs of decode steps: their sizes and the layout of their inputs. The lane
//! that captured the graphs replays them (`lane/graphs.rs`). Their lease is kept with the rest
//! of an engine's memory.

mod captured;
mod core;
mod shape;

pub use captured::Captured;
pub use core::buckets;
pub use shape::GraphShape;
