//! Changes to logits by a grammar, by the caller's options and by the tokens so far.

use super::row::{RowLists, SampleRow};

/// Bit of a token's tally that marks a token of the prompt. The lower bits count how often
/// the token was produced.
const IN_PROMPT: u32 = 1 << 31;

/// Applies all changes to `logits`. `tally` is as long as `logits`.
pub(super) fn change(logits: &mut [f32], row: &SampleRow, row_lists: &RowLists<'_>, tally: &mut [u32]) {
    let vocabulary = logits.len();
    if let Some(allowed) = row_lists.allowed {
        restrict(logits, allowed);
    }
    let known = |id: &&u32| (**id as usize) < vocabulary;
    row_lists.forbidden.iter().filter(known).for_each(|&id| logits[id as usize] = f32::NEG_INFINITY);
    for (&id, &bias) in row_lists.biased.iter().zip(row_lists.biases).filter(|(id, _)| known(id)) {
        let logit = &mut logits[id as usize];
        *logit = bounded(*logit + bias);
    }
    if row.penalizes() {
        penalise(logits, row, row_lists, tally);
    }
}

/// Sets the logit of each token to -infinity if the token's bit in `allowed` (words of
/// 32 bits) is 0.
pub fn restrict(logits: &mut [f32], allowed: &[u32]) {
    // Within a JSON string, most words of the mask have all bits set. Elsewhere, most words are
    // zero.
    for (logits, &word) in logits.chunks_mut(u32::BITS as usize).zip(allowed) {
        match word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            word => {
                let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
        }
    }
}

/// Applies the repetition penalty (Keskar et al. 2019, arXiv 1909.05858; once for each token of
/// prompt and reply), then OpenAI's frequency penalty (each time a token was produced) and presence
/// penalty (once for a token that was produced).
fn penalise<'a>(logits: &mut [f32], row: &SampleRow, row_lists: &RowLists<'a>, tally: &mut [u32]) {
    assert!(row_lists.unseen.is_none(), "the host knows all produced tokens");
    let vocabulary = logits.len();
    tally.fill(0);
    let prompt = if row.repetition == 1.0 { &[] } else { row_lists.prompt };
    let known = |tokens: &'a [u32]| tokens.iter().map(|&id| id as usize).filter(move |&id| id < vocabulary);
    known(prompt).for_each(|id| tally[id] |= IN_PROMPT);
    known(row_lists.produced).for_each(|id| tally[id] += 1);
    for id in known(prompt).chain(known(row_lists.produced)) {
        let count = std::mem::take(&mut tally[id]);
        if count == 0 {
            continue; // the token was already handled
        }
        let logit = logits[id];
        let repeated = if logit < 0.0 { logit * row.repetition } else { logit / row.repetition };
        let times = count & !IN_PROMPT;
        let frequency = row.frequency * f64::from(times);
        let presence = if times > 0 { row.presence } else { 0.0 };
        logits[id] = bounded(repeated - (frequency + presence) as f32);
    }
}

/// Clamps a very large logit, because logits with +infinity have no distribution.
/// Forbidden tokens stay forbidden.
fn bounded(logit: f32) -> f32 {
    if logit == f32::NEG_INFINITY { logit } else { logit.clamp(f32::MIN, f32::MAX) }
}
