//! The token with the largest logit among the tokens of the best clusters.

use super::{
    memory::{Output, Rows, indices, widen},
    threads::Threads,
};
use crate::calls::{ClusteredArgmax, NO_CHOICE};

pub(super) fn clustered_argmax(threads: &Threads, call: ClusteredArgmax<'_>) {
    let (x, scores) = (Rows::<f32>::of(&call.x), Rows::<f32>::of(&call.scores));
    let (tokens, top) = (indices(&call.tokens), call.top);
    let (rows, width) = (call.x.rows(), call.x.columns());
    let size = tokens.len() / call.scores.columns();
    let out = Output::<u32>::of_type(&call.out);
    threads.share(rows, rows * top * size * width, |_, row| {
        let scores = scores.row(row);
        let mut sorted: Vec<f32> = scores.iter().copied().filter(|score| !score.is_nan()).collect();
        sorted.sort_unstable_by(|one, other| other.total_cmp(one));
        let least = sorted.get(top - 1).copied().unwrap_or(f32::NEG_INFINITY);
        let is_selected = |cluster: &usize| scores[*cluster] >= least; // false for NaN
        let mut weights = vec![0.0; width];
        let (mut best, mut token) = (f32::NEG_INFINITY, NO_CHOICE);
        for cluster in (0..scores.len()).filter(is_selected) {
            for next in &tokens[cluster * size..][..size] {
                widen(&call.table, *next as usize, &mut weights);
                let logit: f32 = x.row(row).iter().zip(&weights).map(|(x, weight)| x * weight).sum();
                if !logit.is_nan() && (token == NO_CHOICE || logit > best || logit == best && *next < token) {
                    (best, token) = (logit, *next);
                }
            }
        }
        // SAFETY: each row is one item, so no two threads write the same element.
        unsafe { out.part(row, 0, 1).fill(token) };
    });
}
