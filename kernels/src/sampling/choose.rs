//! The choice from one row.

use super::{
    candidates::{Candidate, draw},
    changes,
    row::{Fault, SampleRow, Wishes},
};

/// Memory for one row: 24 bytes for each of its tokens. What is in it does not matter.
#[derive(Debug)]
pub struct ChoiceScratch<'a> {
    /// `[vocabulary]`.
    pub weights: &'a mut [f64],
    /// `[vocabulary]`.
    pub candidates: &'a mut [Candidate],
    /// `[vocabulary]`.
    pub changed: &'a mut [f32],
    /// `[vocabulary]`.
    pub tally: &'a mut [u32],
}

/// What is wrong with logits as they came.
pub fn fault_of(logits: &[f32]) -> Option<Fault> {
    if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        return Some(Fault::NotNumbers);
    }
    logits.iter().all(|&logit| logit == f32::NEG_INFINITY).then_some(Fault::NothingAllowed)
}

/// The token for `logits`, in which [`fault_of`] finds nothing: the given one, if there is one. The same logits, row and
/// lists give the same token.
///
/// # Errors
/// [`Fault::NothingAllowed`] if all are forbidden.
pub fn choose(logits: &[f32], row: &SampleRow, wishes: &Wishes<'_>, room: ChoiceScratch<'_>) -> Result<u32, Fault> {
    if let Some(given) = row.given {
        return Ok(given);
    }
    let ChoiceScratch { weights, candidates, changed, tally } = room;
    let allowed = if wishes.changes(row) {
        changed.copy_from_slice(logits);
        changes::change(changed, row, wishes, tally);
        changed.iter().any(|logit| *logit > f32::NEG_INFINITY).then_some(&*changed).ok_or(Fault::NothingAllowed)?
    } else {
        logits
    };
    Ok(match row.is_greedy() {
        true => likeliest(allowed),
        false => draw(allowed, row, candidates, weights),
    })
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
