//! Sampling parameters: how a token is chosen, checked once when a request comes in.

use serde::{Deserialize, Serialize};

use crate::error::SamplingError;

/// How tokens are chosen. Build it, change fields, and [`check`](Self::check) it; a [`Sampler`](super::Sampler) does too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 takes the likeliest token; else logits are divided by it.
    pub temperature: f64,
    /// Only so many of the likeliest tokens; 0 is no limit.
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability; 1 is no limit.
    pub top_p: f64,
    /// Only tokens at least this times as likely as the likeliest; 0 is no limit.
    pub min_p: f64,
    /// Divides the logits of tokens seen before when positive, multiplies them when negative; 1 changes nothing.
    pub repetition_penalty: f64,
    /// With the position it decides every random choice.
    pub seed: u64,
}

/// The likeliest token, nothing else.
impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl SamplingParams {
    /// # Errors
    /// [`SamplingError::OutOfRange`] for what is not a number, negative, or out of its range.
    pub fn check(&self) -> Result<(), SamplingError> {
        let require = |parameter, value: f64, holds: bool, range| {
            if holds { Ok(()) } else { Err(SamplingError::OutOfRange { parameter, value, range }) }
        };
        let Self { temperature, top_p, min_p, repetition_penalty: penalty, .. } = *self;
        // Tiny ones are common: Qwen2.5-VL's generation_config.json asks for 1e-6.
        require("temperature", temperature, (0.0..=100.0).contains(&temperature), "from 0 to 100")?;
        require("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        require("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        require("repetition_penalty", penalty, (0.01..=100.0).contains(&penalty), "from 0.01 to 100")
    }

    /// Whether the likeliest token is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }
}
