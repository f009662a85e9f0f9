//! Sampling: logits on the host to one token, the same for a seed whatever the batch.

pub(crate) mod error;
pub mod generation_defaults;
pub mod parameters;
pub mod philox;
pub mod sampler;

pub use generation_defaults::GenerationDefaults;
pub use parameters::SamplingParams;
pub use sampler::{Sampler, SamplerScratch};
