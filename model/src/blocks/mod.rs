//! Layers that families share. They know shapes and weights, not checkpoints' names for them.

pub mod decoder;
mod decoder_config;
pub mod decoder_shape;
pub mod gated_mlp;
pub mod paged_attention;
pub mod step_inputs;

pub use decoder_config::{ConfigError, WIDTH_MAX};
