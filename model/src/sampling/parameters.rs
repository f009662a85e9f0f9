//! Sampling parameters, checked once when a request arrives.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use bursar_kernels::sampling::LISTED_MAX;

use super::error::SamplingError;

/// Parameters of the choice of tokens. After changing fields, call [`check`](Self::check).
/// [`Sampler::new`](super::Sampler::new) also checks them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divisor of the logits, from 0 to 100; 0 chooses the likeliest token.
    pub temperature: f64,
    /// Choose among this many of the likeliest tokens; 0 means no limit.
    pub top_k: usize,
    /// Choose among the likeliest tokens whose probabilities sum to this fraction of the
    /// probability that `top_k` and `min_p` keep. Above 0 and at most 1; 1 means no limit.
    pub top_p: f64,
    /// Choose among tokens whose probability is at least `min_p` times the probability of the
    /// likeliest token; from 0 to 1, where 0 means no limit.
    pub min_p: f64,
    /// Applies to tokens that occur in the prompt or the reply: their positive logits are
    /// divided by the penalty, and their negative logits are multiplied by it. From 0.01 to
    /// 100; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Subtracted once from the logits of tokens that the reply contains. From -2 to 2; 0 changes
    /// nothing. The prompt does not count.
    #[serde(default)]
    pub presence_penalty: f64,
    /// Subtracted from a token's logit once for each occurrence in the reply. From -2 to 2; 0
    /// changes nothing. The prompt does not count.
    #[serde(default)]
    pub frequency_penalty: f64,
    /// Biases from -100 to 100, added to the logits of these tokens, at most 1,024 tokens. A bias
    /// of -100 all but forbids a token, and 100 all but forces it.
    #[serde(default)]
    pub logit_bias: BTreeMap<u32, f64>,
    /// The seed and a token's position determine every random choice.
    pub seed: u64,
}

/// Greedy: always chooses the likeliest token.
impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// # Errors
    /// [`SamplingError::OutOfRange`] for a parameter that is NaN or out of its range;
    /// [`SamplingError::TooManyTokens`] for too many biases.
    pub fn check(&self) -> Result<(), SamplingError> {
        let require = |parameter, value: f64, holds: bool, range| {
            if holds { Ok(()) } else { Err(SamplingError::OutOfRange { parameter, value, range }) }
        };
        let Self { temperature, top_p, min_p, repetition_penalty: repetition, .. } = *self;
        let Self { presence_penalty: presence, frequency_penalty: frequency, .. } = *self;
        // Tiny temperatures are common: Qwen2.5-VL's generation_config.json has 1e-6.
        require("temperature", temperature, (0.0..=100.0).contains(&temperature), "from 0 to 100")?;
        require("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        require("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        require("repetition_penalty", repetition, (0.01..=100.0).contains(&repetition), "from 0.01 to 100")?;
        require("presence_penalty", presence, (-2.0..=2.0).contains(&presence), "from -2 to 2")?;
        require("frequency_penalty", frequency, (-2.0..=2.0).contains(&frequency), "from -2 to 2")?;
        check_listed("logit_bias", self.logit_bias.len())?;
        let mut biases = self.logit_bias.values();
        biases.try_for_each(|&bias| require("logit_bias", bias, (-100.0..=100.0).contains(&bias), "from -100 to 100"))
    }

    /// # Errors
    /// [`SamplingError::UnknownToken`] for a bias on a token that a model with `vocabulary`
    /// logits does not have.
    pub fn check_tokens(&self, vocabulary: usize) -> Result<(), SamplingError> {
        match self.logit_bias.keys().next_back() {
            Some(&token) if token as usize >= vocabulary => {
                Err(SamplingError::UnknownToken { parameter: "logit_bias", token, vocabulary })
            }
            _ => Ok(()),
        }
    }

    /// Whether the parameters always choose the likeliest token.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Whether a penalty reads the tokens that were produced.
    pub(super) fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// # Errors
/// [`SamplingError::TooManyTokens`].
pub(super) fn check_listed(parameter: &'static str, asked: usize) -> Result<(), SamplingError> {
    if asked <= LISTED_MAX { Ok(()) } else { Err(SamplingError::TooManyTokens { parameter, asked, limit: LISTED_MAX }) }
}
