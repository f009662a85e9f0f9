//! Candidates: the tokens of a row that top-k, min-p and top-p keep, and the
//! draw among these tokens.

use super::{philox, row::SampleRow};

/// Number of tokens that top-p sorts at first. A nucleus is usually small, and sorting a vocabulary
/// of 150,000 takes longer than everything else.
const NUCLEUS_FIRST: usize = 256;

/// Factor by which top-p increases the number of tokens to sort if the nucleus is larger.
const NUCLEUS_GROWTH: usize = 8;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Candidate {
    pub logit: f32,
    pub id: u32,
}

/// Draws one of the tokens that top-k, min-p and top-p of `row` keep. At least one logit must be
/// finite.
///
/// The rules are the same as in transformers 5.17 (`generation/logits_process.py`): temperature,
/// top-k (ties with the last kept token stay), top-p (the token that crosses the threshold stays),
/// min-p. The order is the same as in vLLM 0.33, where top-p refers to the total probability of the
/// tokens that min-p has kept (`v1/sample/sampler.py`).
pub(super) fn draw(logits: &[f32], row: &SampleRow, candidates: &mut [Candidate], weights: &mut [f64]) -> u32 {
    let mut count = 0;
    for (&logit, id) in logits.iter().zip(0u32..).filter(|(logit, _)| logit.is_finite()) {
        candidates[count] = Candidate { logit, id };
        count += 1;
    }
    let top_k = row.top_k as usize;
    if top_k > 0 && top_k < count {
        count = keep_top_k(&mut candidates[..count], top_k);
    }
    let kept = &candidates[..count];
    let largest = kept.iter().fold(f32::NEG_INFINITY, |largest, candidate| largest.max(candidate.logit));
    let weight = |logit: f32| (f64::from(logit - largest) / row.temperature).exp();
    if row.min_p_logarithm > f64::NEG_INFINITY {
        // The likeliest token has weight 1, so the comparison needs neither a normalization nor
        // an exponential per token.
        count = keep(&mut candidates[..count], |candidate| {
            f64::from(candidate.logit - largest) / row.temperature >= row.min_p_logarithm
        });
    }
    if row.top_p < 1.0 {
        count = keep_top_p(&mut candidates[..count], row.top_p, weight);
    }
    for (out, candidate) in weights.iter_mut().zip(&candidates[..count]) {
        *out = weight(candidate.logit);
    }
    candidates[pick(&weights[..count], philox::uniform(row.seed, row.position))].id
}

/// Moves the candidates that `wanted` accepts to the front, in order. Returns their number.
fn keep(candidates: &mut [Candidate], wanted: impl Fn(&Candidate) -> bool) -> usize {
    let mut count = 0;
    for at in 0..candidates.len() {
        if wanted(&candidates[at]) {
            candidates[count] = candidates[at];
            count += 1;
        }
    }
    count
}

/// Keeps the `top_k` likeliest candidates and all ties with the last of them, sorted by
/// likelihood and then by id. Returns the number of kept candidates. Without top-k, candidates
/// stay in vocabulary order.
fn keep_top_k(candidates: &mut [Candidate], top_k: usize) -> usize {
    let (_, &mut Candidate { logit: least, .. }, _) = candidates.select_nth_unstable_by(top_k - 1, likelier);
    let count = keep(candidates, |candidate| candidate.logit >= least);
    // Selection leaves the tokens in an unspecified order. Sorting makes the order unique.
    candidates[..count].sort_unstable_by(likelier);
    count
}

/// Keeps the likeliest tokens that together reach `top_p`, sorted by likelihood (Holtzman et al.
/// 2019, arXiv 1904.09751). Returns the number of kept tokens.
fn keep_top_p(candidates: &mut [Candidate], top_p: f64, weight: impl Fn(f32) -> f64) -> usize {
    let threshold = top_p * candidates.iter().map(|candidate| weight(candidate.logit)).sum::<f64>();
    let (mut sorted, mut reached) = (0, 0.0);
    let mut widen = NUCLEUS_FIRST;
    loop {
        let rest = &mut candidates[sorted..];
        if widen < rest.len() {
            rest.select_nth_unstable_by(widen - 1, likelier);
        }
        let next = widen.min(rest.len());
        rest[..next].sort_unstable_by(likelier);
        for candidate in &rest[..next] {
            reached += weight(candidate.logit);
            sorted += 1;
            if reached >= threshold {
                return sorted;
            }
        }
        if sorted == candidates.len() {
            return sorted;
        }
        widen *= NUCLEUS_GROWTH;
    }
}

fn likelier(one: &Candidate, other: &Candidate) -> std::cmp::Ordering {
    other.logit.total_cmp(&one.logit).then(one.id.cmp(&other.id))
}

/// Returns the index at which the cumulative distribution exceeds `uniform`, a number in [0, 1).
fn pick(weights: &[f64], uniform: f64) -> usize {
    let mut rest = uniform * weights.iter().sum::<f64>();
    for (index, &weight) in weights.iter().enumerate() {
        if rest < weight {
            return index;
        }
        rest -= weight;
    }
    // Rounding can leave a small remainder. In that case the last token with a weight
    // above 0 is chosen.
    weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0)
}
