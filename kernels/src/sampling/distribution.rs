//! Log-probabilities: a row's own distribution, before anything chooses from it.

/// Terms smaller than e^-64 of the largest do not change a sum of 2^24 of them in f64: their exponentials are spared.
const NEGLIGIBLE: f32 = -64.0;

/// The log-softmax of a row in f64: vLLM's `raw_logprobs`.
#[derive(Clone, Copy, Debug)]
pub struct Distribution {
    largest: f32,
    log_total: f64,
}

impl Distribution {
    /// Of `logits` in which [`fault_of`](super::fault_of) finds nothing.
    pub fn of(logits: &[f32]) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let terms = logits.iter().map(|logit| logit - largest).filter(|term| *term > NEGLIGIBLE);
        let total: f64 = terms.map(|term| f64::from(term).exp()).sum();
        Distribution { largest, log_total: total.ln() }
    }

    /// The natural logarithm of the probability of a token with this logit.
    pub fn log_probability(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.largest) - self.log_total) as f32
    }

    /// The `count` likeliest tokens, largest logit first, equals by id; impossible ones are left out. One pass: nearly
    /// every logit is compared with the least of them and forgotten.
    pub fn likeliest(logits: &[f32], count: usize) -> Vec<(f32, u32)> {
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
}
