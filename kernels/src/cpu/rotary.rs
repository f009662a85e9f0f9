//! Rotary position embedding.

use super::{
    memory::{Rows, widened, write_rows},
    threads::Threads,
};
use crate::{
    Tensor,
    calls::{PairAxes, Rotary},
};

pub(super) fn rotary(threads: &Threads, call: Rotary<'_>) {
    let (heads, head_dim) = (call.heads, 2 * call.frequencies.rows());
    if let Some(norm) = &call.norm {
        let weight = widened(&norm.weight);
        write_rows(threads, &call.x, 4, |_, row| {
            for x in row.chunks_exact_mut(head_dim).take(heads) {
                normalize_head(x, &weight, norm.weight_offset, norm.epsilon);
            }
        });
    }
    turn(threads, &call.x, (heads, head_dim), &call.positions, &call.frequencies, call.axes);
}

/// Divides the elements of a head by their root mean square, and multiplies them by the weight.
pub(super) fn normalize_head(x: &mut [f32], weight: &[f32], weight_offset: f32, epsilon: f32) {
    let scale = inverse_root_mean_square(x, epsilon);
    x.iter_mut().zip(weight).for_each(|(x, weight)| *x *= scale * (weight + weight_offset));
}

pub(super) fn inverse_root_mean_square(x: &[f32], epsilon: f32) -> f32 {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    (mean + epsilon).sqrt().recip()
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
