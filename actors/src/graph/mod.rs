//! Captured graphs of decoding: which sizes there are, where their inputs lie, and what pays for them. The lane that
//! captured them replays them (`lane/graphs.rs`).

mod capture;
mod core;
mod inputs;

pub use capture::{CaptureError, Recaptured, capture, recapture};
pub use core::{bucket_of, buckets};
pub use inputs::{GraphInputs, GraphShape};
