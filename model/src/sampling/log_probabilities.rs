//! Log-probabilities: the model's distribution over a row of logits, before sampling parameters
//! change it.

use bursar_kernels::{
    ops::sample::Outcome,
    sampling::{Distribution, TOP_MAX},
};

use super::error::SamplingError;
use crate::flow::token::{LogProbabilities, LogProbability};

/// Maximum number of likeliest tokens that a request may ask for, as in OpenAI's API and vLLM.
pub const TOP_LOG_PROBABILITIES_MAX: usize = TOP_MAX;

/// The log-probability of `token` in a row of logits, with the log-probabilities of the `top`
/// likeliest tokens. In a prompt, `token` is the token that actually followed.
///
/// The result is the log-softmax, in f64, of the unchanged logits. It equals vLLM's `raw_logprobs`,
/// except that tokens that a grammar forbids still count here.
///
/// # Errors
/// [`SamplingError::TooManyLogProbabilities`]; [`SamplingError::UnknownToken`] for a token beyond
/// the logits; for bad logits, the errors of [`Sampler::sample`](super::Sampler::sample).
pub fn log_probabilities(
    logits: &[f32], // [vocabulary]
    token: u32,
    top: usize,
) -> Result<LogProbabilities, SamplingError> {
    check_top(top)?;
    check_logits(logits)?;
    if token as usize >= logits.len() {
        return Err(SamplingError::UnknownToken { parameter: "tokens", token, vocabulary: logits.len() });
    }
    let distribution = Distribution::of(logits);
    let of = |logit, id| LogProbability { id, log_probability: distribution.log_probability(logit) };
    Ok(LogProbabilities {
        chosen: of(logits[token as usize], token),
        top: Distribution::top(logits, top).into_iter().map(|(logit, id)| of(logit, id)).collect(),
    })
}

/// The device's report on the token of a row. `None` if the row has no report.
pub(super) fn reported(outcome: &Outcome) -> Option<LogProbabilities> {
    let of = |id, log_probability| LogProbability { id, log_probability };
    let chosen = of(outcome.chosen.ok()?, outcome.log_probability?);
    Some(LogProbabilities { chosen, top: outcome.top.iter().map(|&(id, logarithm)| of(id, logarithm)).collect() })
}

/// # Errors
/// [`SamplingError::TooManyLogProbabilities`].
pub(super) fn check_top(top: usize) -> Result<(), SamplingError> {
    if top <= TOP_LOG_PROBABILITIES_MAX {
        Ok(())
    } else {
        Err(SamplingError::TooManyLogProbabilities { asked: top, limit: TOP_LOG_PROBABILITIES_MAX })
    }
}

/// Refuses logits from which no token can be chosen.
///
/// # Errors
/// [`SamplingError::NoLogits`], [`SamplingError::BadLogit`], [`SamplingError::NothingAllowed`].
pub(super) fn check_logits(logits: &[f32]) -> Result<(), SamplingError> {
    if logits.is_empty() {
        return Err(SamplingError::NoLogits);
    }
    if let Some(token) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        return Err(SamplingError::BadLogit { token });
    }
    if logits.iter().all(|&logit| logit == f32::NEG_INFINITY) {
        return Err(SamplingError::NothingAllowed { logits: logits.len() });
    }
    Ok(())
}
