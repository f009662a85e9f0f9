//! The choice of a token from one row of logits.

use super::{
    candidates::{Candidate, draw},
    changes,
    row::{Fault, RowLists, SampleRow},
};

/// Scratch for one row: 24 bytes per vocabulary entry. Its initial contents do not matter.
#[derive(Debug)]
pub struct ChoiceScratch<'a> {
    /// `[vocabulary]`: weights of the candidates.
    pub weights: &'a mut [f64],
    /// `[vocabulary]`: tokens that may be drawn, with their logits.
    pub candidates: &'a mut [Candidate],
    /// `[vocabulary]`: logits after penalties, biases and masks.
    pub changed: &'a mut [f32],
    /// `[vocabulary]`: how often each token occurs so far, for penalties.
    pub tally: &'a mut [u32],
}

/// Returns the fault in the unchanged logits, if there is a fault.
pub fn fault_of(logits: &[f32]) -> Option<Fault> {
    if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        return Some(Fault::NonFiniteLogits);
    }
    logits.iter().all(|&logit| logit == f32::NEG_INFINITY).then_some(Fault::NothingAllowed)
}

/// Chooses a token from `logits`, which must have no fault according to [`fault_of`]. If
/// `row.given` is set, that token is returned. The choice is deterministic: the same logits, `row`
/// and `row_lists` always give the same token.
///
/// # Errors
/// [`Fault::NothingAllowed`] if every token is forbidden.
pub fn choose(
    logits: &[f32],
    row: &SampleRow,
    row_lists: &RowLists<'_>,
    buffers: ChoiceScratch<'_>,
) -> Result<u32, Fault> {
    if let Some(given) = row.given {
        return Ok(given);
    }
    let ChoiceScratch { weights, candidates, changed, tally } = buffers;
    let allowed = if row_lists.changes(row) {
        changed.copy_from_slice(logits);
        changes::change(changed, row, row_lists, tally);
        changed.iter().any(|logit| *logit > f32::NEG_INFINITY).then_some(&*changed).ok_or(Fault::NothingAllowed)?
    } else {
        logits
    };
    Ok(if row.is_greedy() { argmax(allowed) } else { draw(allowed, row, candidates, weights) })
}

/// Returns the first index of the largest logit, like `argmax` of torch and numpy on a CPU.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = id;
        }
    }
    best as u32
}
