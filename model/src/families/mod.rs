//! One folder a model family: all that is known of it alone. No family imports another.

pub mod qwen2;
pub mod qwen2_5_vl;
