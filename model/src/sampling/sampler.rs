//! The sampler: one row of logits and a sequence's past, to the next token.
//!
//! Order and rules are those of transformers 5.17 (`generation/logits_process.py`): repetition penalty, temperature, top-k
//! (ties with the last kept one stay), top-p (the token that crosses the threshold stays), min-p; then a draw.

use super::parameters::SamplingParams;
use super::philox;
use crate::error::SamplingError;
use crate::flow::token::Token;

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
}

/// Buffers that are reused from token to token: 20 bytes for each of the vocabulary's tokens at most.
#[derive(Clone, Debug, Default)]
pub struct SamplerScratch {
    logits: Vec<f32>,
    seen: Vec<u32>,
    candidates: Vec<(f32, u32)>,
    weights: Vec<f64>,
}

impl Sampler {
    /// # Errors
    /// As [`SamplingParams::check`].
    pub fn new(params: SamplingParams) -> Result<Self, SamplingError> {
        params.check()?;
        Ok(Sampler { params })
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The token at `position` of the sequence, after `history` (prompt and reply so far; only the repetition penalty
    /// reads it, and skips ids beyond the logits).
    ///
    /// # Errors
    /// [`SamplingError::NoLogits`], [`SamplingError::BadLogit`] for NaN and +infinity, and
    /// [`SamplingError::NothingAllowed`] when all are -infinity.
    pub fn sample(
        &self,
        logits: &[f32], // [vocabulary]
        history: &[u32],
        position: u64,
        scratch: &mut SamplerScratch,
    ) -> Result<Token, SamplingError> {
        check_logits(logits)?;
        let SamplerScratch { logits: penalised, seen, candidates, weights } = scratch;
        let logits = self.penalise(logits, history, penalised, seen);
        if self.params.is_greedy() {
            return Ok(Token { id: likeliest(logits), position, log_probability: 0.0 });
        }
        self.gather(logits, candidates);
        self.weigh(candidates, weights);
        let chosen = draw(weights, philox::uniform(self.params.seed, position));
        let total: f64 = weights.iter().sum();
        let log_probability = (weights[chosen] / total).ln() as f32;
        Ok(Token { id: candidates[chosen].1, position, log_probability })
    }

    /// `RepetitionPenaltyLogitsProcessor` (Keskar et al. 2019, arXiv 1909.05858): each token seen counts once.
    fn penalise<'a>(
        &self,
        logits: &'a [f32],
        history: &[u32],
        penalised: &'a mut Vec<f32>,
        seen: &mut Vec<u32>,
    ) -> &'a [f32] {
        let penalty = self.params.repetition_penalty as f32;
        if penalty == 1.0 || history.is_empty() {
            return logits;
        }
        penalised.clear();
        penalised.extend_from_slice(logits);
        seen.clear();
        seen.extend(history.iter().filter(|&&id| (id as usize) < logits.len()));
        seen.sort_unstable();
        seen.dedup();
        for &id in seen.iter() {
            let logit = &mut penalised[id as usize];
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
        penalised
    }

    /// The tokens that top-k leaves, likeliest first; equal ones by id, so that the order is one. Without top-k they stay
    /// in the vocabulary's order unless top-p needs them sorted.
    fn gather(&self, logits: &[f32], candidates: &mut Vec<(f32, u32)>) {
        let top_k = self.params.top_k;
        let allowed = logits.iter().zip(0u32..).filter(|(logit, _)| logit.is_finite());
        candidates.clear();
        candidates.extend(allowed.map(|(&logit, id)| (logit, id)));
        if top_k > 0 && top_k < candidates.len() {
            let (_, &mut (least, _), _) = candidates.select_nth_unstable_by(top_k - 1, likelier);
            candidates.retain(|&(logit, _)| logit >= least);
            // Selecting moves tokens about: one order again.
            candidates.sort_unstable_by(likelier);
        } else if self.params.top_p < 1.0 {
            candidates.sort_unstable_by(likelier);
        }
    }

    /// Unnormalised probabilities of the candidates; cuts both lists by top-p and min-p.
    fn weigh(&self, candidates: &mut Vec<(f32, u32)>, weights: &mut Vec<f64>) {
        let SamplingParams { temperature, top_p, min_p, .. } = self.params;
        let largest = candidates.iter().fold(f32::NEG_INFINITY, |largest, &(logit, _)| largest.max(logit));
        weights.clear();
        weights.extend(candidates.iter().map(|&(logit, _)| (f64::from(logit - largest) / temperature).exp()));
        if top_p < 1.0 {
            let threshold = top_p * weights.iter().sum::<f64>();
            let mut reached = 0.0;
            let kept = weights.iter().take_while(|&&weight| {
                let before = reached;
                reached += weight;
                before < threshold
            });
            let kept = kept.count().max(1);
            candidates.truncate(kept);
            weights.truncate(kept);
        }
        if min_p > 0.0 {
            // The likeliest has weight 1, so that the bound needs no normalising.
            let mut keeps = weights.iter().map(|&weight| weight >= min_p);
            candidates.retain(|_| keeps.next().unwrap_or(false));
            weights.retain(|&weight| weight >= min_p);
        }
    }
}

fn check_logits(logits: &[f32]) -> Result<(), SamplingError> {
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

fn likelier(one: &(f32, u32), other: &(f32, u32)) -> std::cmp::Ordering {
    other.0.total_cmp(&one.0).then(one.1.cmp(&other.1))
}

/// The first of the largest, as `argmax` of torch and numpy on a CPU.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Inverse of the cumulative distribution at `uniform` in [0, 1).
fn draw(weights: &[f64], uniform: f64) -> usize {
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
