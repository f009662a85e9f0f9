//! Rotary position embedding.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::{
    Tensor,
    calls::{PairAxes, Rotary},
};

pub(super) fn rotary(threads: &Threads, call: Rotary<'_>) {
    turn(threads, &call.x, (call.heads, 2 * call.frequencies.rows()), &call.positions, &call.frequencies, call.axes);
}

/// Rotates the first `2 * frequencies.rows()` elements of each of the first `heads` heads of each
/// row of `x`.
pub(super) fn turn(
    threads: &Threads,
    x: &Tensor<'_>,
    (heads, head_dim): (usize, usize),
    positions: &Tensor<'_>,
    frequencies: &Tensor<'_>,
    axes: &PairAxes,
) {
    let positions = Rows::<u32>::of(positions);
    let frequencies = Rows::<f32>::of(frequencies).all();
    let pairs = frequencies.len();
    let axes = axes.of_pairs(pairs);
    write_rows(threads, x, 8, |row, x| {
        let turns: Vec<(f32, f32)> = axes
            .iter()
            .zip(frequencies)
            .map(|(axis, frequency)| (positions.row(*axis)[row] as f32 * frequency).sin_cos())
            .collect();
        for head in x.chunks_exact_mut(head_dim).take(heads) {
            let (left, right) = head[..2 * pairs].split_at_mut(pairs);
            for ((left, right), (sin, cos)) in left.iter_mut().zip(right).zip(&turns) {
                (*left, *right) = (*left * cos - *right * sin, *right * cos + *left * sin);
            }
        }
    });
}
