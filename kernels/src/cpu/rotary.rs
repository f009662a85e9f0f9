//! Rotary position embedding.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::ops::rotary::Call;

pub(super) fn rotary(threads: &Threads, call: Call<'_>) {
    let positions = Rows::<u32>::of(&call.positions);
    let frequencies = Rows::<f32>::of(&call.frequencies).all();
    let pairs = frequencies.len();
    // The axis of each pair, spelled out once.
    let axes: Vec<usize> =
        call.sections.iter().enumerate().flat_map(|(axis, count)| std::iter::repeat_n(axis, *count)).collect();
    write_rows(threads, &call.x, 8, |row, x| {
        let turns: Vec<(f32, f32)> = axes
            .iter()
            .zip(frequencies)
            .map(|(axis, frequency)| (positions.row(*axis)[row] as f32 * frequency).sin_cos())
            .collect();
        for head in x.chunks_exact_mut(2 * pairs).take(call.heads) {
            let (left, right) = head.split_at_mut(pairs);
            for ((left, right), (sin, cos)) in left.iter_mut().zip(right).zip(&turns) {
                (*left, *right) = (*left * cos - *right * sin, *right * cos + *left * sin);
            }
        }
    });
}
