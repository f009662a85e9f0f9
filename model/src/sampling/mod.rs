//! Sampling: a request's parameters, and the choice of the next tokens in a step. Equal logits,
//! past tokens and seeds give equal tokens in any batch.

pub mod buffers;
pub(crate) mod error;
pub mod generation_defaults;
pub mod grammar;
pub mod log_probabilities;
pub mod parameters;
pub mod past;
pub mod sampler;
pub mod scores;

pub use buffers::{SamplingBuffers, SamplingShape, argmax_into};
pub use bursar_kernels::sampling::philox;
pub use generation_defaults::GenerationDefaults;
pub use grammar::{
    ForcedCalls, Grammar, GrammarCompiler, JsonWhitespace, NotFollowed, OutputFormat, ReplyForm, close_objects,
};
pub use log_probabilities::{TOP_LOG_PROBABILITIES_MAX, log_probabilities};
pub use parameters::SamplingParams;
pub use past::Past;
pub use sampler::{Sampler, SamplerScratch};
pub use scores::{Score, Scored, Scores};
