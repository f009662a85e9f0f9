//! Log-probabilities of a row's unchanged distribution.

/// Logits more than 64 below the largest do not change an f64 sum of 2^24 exponentials, so
/// their exponentials are skipped.
const NEGLIGIBLE: f32 = -64.0;

/// The log-softmax of a row in f64: vLLM's `raw_logprobs`.
#[derive(Clone, Copy, Debug)]
pub struct Distribution {
    largest: f32,
    log_total: f64,
}

impl Distribution {
    /// Computes the distribution of `logits`, which must have no
    /// fault according to [`fault_of`](super::fault_of).
    pub fn of(logits: &[f32]) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let terms = logits.iter().map(|logit| logit - largest).filter(|term| *term > NEGLIGIBLE);
        let total: f64 = terms.map(|term| f64::from(term).exp()).sum();
        Distribution { largest, log_total: total.ln() }
    }

    /// Returns the natural logarithm of the probability of a token with this logit.
    pub fn log_probability(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.largest) - self.log_total) as f32
    }

    /// Returns the `count` likeliest tokens, largest logit first and ties by id, without impossible
    /// tokens. The search takes one pass, in which nearly every logit is only compared with the
    /// smallest logit kept so far.
    pub fn top(logits: &[f32], count: usize) -> Vec<(f32, u32)> {
        let mut top: Vec<(f32, u32)> = Vec::with_capacity(count + 1);
        let mut least = f32::NEG_INFINITY;
        for (&logit, id) in logits.iter().zip(0u32..) {
            if logit > least && count > 0 {
                // Equal logits stay in the order of their ids.
                let place = top.partition_point(|&(other, _)| other >= logit);
                top.insert(place, (logit, id));
                top.truncate(count);
                least = if top.len() == count { top[count - 1].0 } else { least };
            }
        }
        top
    }
}
