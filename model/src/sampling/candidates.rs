//! Candidates: the tokens that top-k, top-p and min-p leave of a row, and the draw among them.

use super::parameters::SamplingParams;

/// Tokens that top-p looks at first, and by how much it widens its look: a nucleus is mostly small, and sorting a
/// vocabulary of 150,000 takes longer than all else.
const NUCLEUS_FIRST: usize = 256;
const NUCLEUS_GROWTH: usize = 8;

/// Buffers for one row: 16 bytes for each of the vocabulary's tokens at most.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    tokens: Vec<(f32, u32)>,
    weights: Vec<f64>,
}

impl Candidates {
    /// Draws one of the tokens that the parameters leave of `logits`, by `uniform` in [0, 1). One logit at least is
    /// finite.
    ///
    /// Order and rules are those of transformers 5.17 (`generation/logits_process.py`): temperature, top-k (ties with
    /// the last kept one stay), top-p (the token that crosses the threshold stays), min-p.
    pub(super) fn draw(&mut self, logits: &[f32], params: &SamplingParams, uniform: f64) -> u32 {
        let allowed = logits.iter().zip(0u32..).filter(|(logit, _)| logit.is_finite());
        self.tokens.clear();
        self.tokens.extend(allowed.map(|(&logit, id)| (logit, id)));
        self.keep_top_k(params.top_k);
        let largest = self.tokens.iter().fold(f32::NEG_INFINITY, |largest, &(logit, _)| largest.max(logit));
        let weight = |logit: f32| (f64::from(logit - largest) / params.temperature).exp();
        if params.top_p < 1.0 {
            self.keep_top_p(params.top_p, weight);
        }
        if params.min_p > 0.0 {
            // The likeliest has weight 1, so that the bound needs no normalising, nor an exponential a token.
            let least = params.min_p.ln();
            self.tokens.retain(|&(logit, _)| f64::from(logit - largest) / params.temperature >= least);
        }
        self.weights.clear();
        self.weights.extend(self.tokens.iter().map(|&(logit, _)| weight(logit)));
        self.tokens[pick(&self.weights, uniform)].1
    }

    /// Likeliest first, equal ones by id, so that the order is one. Without top-k they stay in the vocabulary's order.
    fn keep_top_k(&mut self, top_k: usize) {
        if top_k > 0 && top_k < self.tokens.len() {
            let (_, &mut (least, _), _) = self.tokens.select_nth_unstable_by(top_k - 1, likelier);
            self.tokens.retain(|&(logit, _)| logit >= least);
            // Selecting moves tokens about: one order again.
            self.tokens.sort_unstable_by(likelier);
        }
    }

    /// The likeliest tokens that together reach `top_p`, likeliest first (Holtzman et al. 2019, arXiv 1904.09751).
    fn keep_top_p(&mut self, top_p: f64, weight: impl Fn(f32) -> f64) {
        let threshold = top_p * self.tokens.iter().map(|&(logit, _)| weight(logit)).sum::<f64>();
        let (mut sorted, mut reached) = (0, 0.0);
        let mut widen = NUCLEUS_FIRST;
        loop {
            let rest = &mut self.tokens[sorted..];
            if widen < rest.len() {
                rest.select_nth_unstable_by(widen - 1, likelier);
            }
            let next = widen.min(rest.len());
            rest[..next].sort_unstable_by(likelier);
            for &(logit, _) in &rest[..next] {
                reached += weight(logit);
                sorted += 1;
                if reached >= threshold {
                    return self.tokens.truncate(sorted);
                }
            }
            if sorted == self.tokens.len() {
                return;
            }
            widen *= NUCLEUS_GROWTH;
        }
    }
}

fn likelier(one: &(f32, u32), other: &(f32, u32)) -> std::cmp::Ordering {
    other.0.total_cmp(&one.0).then(one.1.cmp(&other.1))
}

/// Inverse of the cumulative distribution at `uniform` in [0, 1).
fn pick(weights: &[f64], uniform: f64) -> usize {
    let mut rest = uniform * weights.iter().sum::<f64>();
    for (index, &weight) in weights.iter().enumerate() {
        if rest < weight {
            return index;
        }
        rest -= weight;
    }
    // Rounding can leave a little over: the last token that can be drawn at all.
    weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0)
}
