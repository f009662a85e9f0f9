//! Everything this project knows about models: checkpoints, pictures and text.
//!
//! [`flow`] has the data types that pass between the stages: image bytes, patches, embeddings, step
//! batch, logits, token. A family is written once, generic over the backend. Planning, profiling
//! and serving run the same code.
//!
//! This crate must never know an actor, a scheduling policy, the state of a request, or HTTP. It
//! allocates no device memory: the caller passes each model the segment that holds its weights.

#![warn(clippy::match_bool)]

pub mod blocks;
pub mod cache_file;
pub mod checkpoint;
mod cost;
pub mod demo;
mod depth;
mod envelope;
pub mod error;
mod families;
pub mod flow;
mod load_error;
mod merge_size;
mod model;
mod nearest_names;
pub mod processor;
pub mod registry;
pub mod sampling;
pub mod text;
pub mod weights;
pub mod workload;
pub mod worst_cases;

pub use cost::{EncoderCost, RequestCost};
pub use depth::Depth;
pub use envelope::{DRAFTS_OF_STEP, Envelope, LimitError, PATCHES_LEAST};
pub use load_error::LoadError;
pub use merge_size::MergeSize;
pub use model::Model;
pub use nearest_names::nearest_names;
