//! Log-probabilities: the model's own distribution over a row of logits, before anything chooses from it.

use super::sampler::check_logits;
use crate::error::SamplingError;
use crate::flow::token::{LogProbabilities, LogProbability};

/// The likeliest tokens that may be asked for, as OpenAI's API and vLLM bound them.
pub const TOP_LOG_PROBABILITIES_MAX: usize = 20;

/// Terms smaller than e^-64 of the largest do not change a sum of 2^24 of them in f64: their exponentials are spared.
const NEGLIGIBLE: f32 = -64.0;

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
    Ok(Distribution::of(logits, top).with(logits, token))
}

/// # Errors
/// [`SamplingError::TooManyLogProbabilities`].
pub(super) fn check_top(top: usize) -> Result<(), SamplingError> {
    match top <= TOP_LOG_PROBABILITIES_MAX {
        true => Ok(()),
        false => Err(SamplingError::TooManyLogProbabilities { asked: top, limit: TOP_LOG_PROBABILITIES_MAX }),
    }
}

/// What is known of a row before a token is chosen from it.
struct Distribution {
    largest: f32,
    log_total: f64,
    top: Vec<(f32, u32)>,
}

impl Distribution {
    /// `logits` were checked: one of them is finite, none is NaN or +infinity.
    fn of(logits: &[f32], top: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let terms = logits.iter().map(|logit| logit - largest).filter(|term| *term > NEGLIGIBLE);
        let total: f64 = terms.map(|term| f64::from(term).exp()).sum();
        Distribution { largest, log_total: total.ln(), top: likeliest(logits, top) }
    }

    fn with(self, logits: &[f32], token: u32) -> LogProbabilities {
        let of = |logit: f32, id| {
            let log_probability = (f64::from(logit) - f64::from(self.largest) - self.log_total) as f32;
            LogProbability { id, log_probability }
        };
        LogProbabilities {
            chosen: of(logits[token as usize], token),
            top: self.top.iter().map(|&(logit, id)| of(logit, id)).collect(),
        }
    }
}

/// The `count` largest, in one pass: nearly every logit is compared with the least of them and forgotten.
fn likeliest(logits: &[f32], count: usize) -> Vec<(f32, u32)> {
    let mut top: Vec<(f32, u32)> = Vec::with_capacity(count + 1);
    let mut least = f32::NEG_INFINITY;
    for (&logit, id) in logits.iter().zip(0u32..) {
        if logit > least && count > 0 {
            // Equal ones stay in the order of their ids.
            let place = top.partition_point(|&(other, _)| other >= logit);
            top.insert(place, (logit, id));
            top.truncate(count);
            least = if top.len() == count { top[count - 1].0 } else { least };
        }
    }
    top
}
