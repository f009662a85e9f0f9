//! Log-probabilities: the model's own distribution over a row of logits, before anything chooses from it.

use bursar_kernels::{
    ops::sample::Outcome,
    sampling::{Distribution, TOP_MAX},
};

use super::error::SamplingError;
use super::sampler::check_logits;
use crate::flow::token::{LogProbabilities, LogProbability};

/// The likeliest tokens that may be asked for, as OpenAI's API and vLLM bound them.
pub const TOP_LOG_PROBABILITIES_MAX: usize = TOP_MAX;

/// How likely a model holds `token` after the text whose last row of `logits` this is, with the `top` likeliest tokens.
/// For a prompt, `token` is the one that really followed.
///
/// It is the log-softmax of the logits as they come from the model, in f64: vLLM's `raw_logprobs`, but before a grammar
/// forbids anything too.
///
/// # Errors
/// [`SamplingError::TooManyLogProbabilities`], [`SamplingError::UnknownToken`] for a token beyond the logits, and what
/// is wrong with the logits, as in [`Sampler::sample`](super::Sampler::sample).
pub fn log_probabilities(
    logits: &[f32], // [vocabulary]
    token: u32,
    top: usize,
) -> Result<LogProbabilities, SamplingError> {
    check_top(top)?;
    check_logits(logits)?;
    if token as usize >= logits.len() {
        return Err(SamplingError::UnknownToken { token, vocabulary: logits.len() });
    }
    let distribution = Distribution::of(logits);
    let of = |logit, id| LogProbability { id, log_probability: distribution.log_probability(logit) };
    Ok(LogProbabilities {
        chosen: of(logits[token as usize], token),
        top: Distribution::likeliest(logits, top).into_iter().map(|(logit, id)| of(logit, id)).collect(),
    })
}

/// What the device says of a row's token; none if it says nothing.
pub(super) fn reported(outcome: &Outcome) -> Option<LogProbabilities> {
    let of = |id, log_probability| LogProbability { id, log_probability };
    let chosen = of(outcome.chosen.ok()?, outcome.log_probability?);
    Some(LogProbabilities { chosen, top: outcome.top.iter().map(|&(id, logarithm)| of(id, logarithm)).collect() })
}

/// # Errors
/// [`SamplingError::TooManyLogProbabilities`].
pub(super) fn check_top(top: usize) -> Result<(), SamplingError> {
    match top <= TOP_LOG_PROBABILITIES_MAX {
        true => Ok(()),
        false => Err(SamplingError::TooManyLogProbabilities { asked: top, limit: TOP_LOG_PROBABILITIES_MAX }),
    }
}
