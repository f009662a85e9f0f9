//! Captured graphs of decoding: which sizes there are, how their inputs lie, and how a lane is asked for them. The lane that
//! captured them replays them (`lane/graphs.rs`); what pays for them is with the rest of an engine's memory.

mod capture;
mod core;
mod shape;

pub(crate) use capture::capture_one;
pub use capture::{CaptureError, Captured, Recaptured, capture, recapture};
pub use core::buckets;
pub use shape::GraphShape;
