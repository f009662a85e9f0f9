//! Penalties: logits changed by what the caller wishes and by what was said already.

use super::parameters::SamplingParams;
use super::past::Tokens;

/// In a token's tally: it stands in the prompt. The lower bits count how often it was produced.
const IN_PROMPT: u32 = 1 << 31;

/// Adds each token's bias.
pub(super) fn add_biases(logits: &mut [f32], params: &SamplingParams) {
    for (&token, &bias) in &params.logit_bias {
        let logit = &mut logits[token as usize];
        *logit = bounded(*logit + bias as f32);
    }
}

/// Repetition penalty (Keskar et al. 2019, arXiv 1909.05858; each token of prompt and reply once), then OpenAI's
/// frequency penalty (each time a token was produced) and presence penalty (once for a token that was produced).
///
/// Ids beyond the logits are skipped: placeholders of pictures may lie there. `tally` is all zero between calls.
pub(super) fn penalise<'a>(logits: &mut [f32], params: &SamplingParams, past: Tokens<'a>, tally: &mut Vec<u32>) {
    let vocabulary = logits.len();
    tally.resize(vocabulary, 0);
    let prompt = if params.repetition_penalty == 1.0 { &[] } else { past.prompt };
    let known = |tokens: &'a [u32]| tokens.iter().map(|&id| id as usize).filter(move |&id| id < vocabulary);
    known(prompt).for_each(|id| tally[id] |= IN_PROMPT);
    known(past.produced).for_each(|id| tally[id] += 1);
    let repetition = params.repetition_penalty as f32;
    for id in known(prompt).chain(known(past.produced)) {
        let count = std::mem::take(&mut tally[id]);
        if count == 0 {
            continue; // met before
        }
        let logit = logits[id];
        let repeated = if logit < 0.0 { logit * repetition } else { logit / repetition };
        let times = count & !IN_PROMPT;
        let frequency = params.frequency_penalty * f64::from(times);
        let presence = if times > 0 { params.presence_penalty } else { 0.0 };
        logits[id] = bounded(repeated - (frequency + presence) as f32);
    }
}

/// A very large logit must not become +infinity, which has no distribution. What is forbidden stays forbidden.
fn bounded(logit: f32) -> f32 {
    if logit == f32::NEG_INFINITY { logit } else { logit.clamp(f32::MIN, f32::MAX) }
}
