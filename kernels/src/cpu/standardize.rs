//! Standardizes columns.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::calls::Standardize;

pub(super) fn standardize(threads: &Threads, call: Standardize<'_>) {
    let (shift, scale, factor) = (Rows::<f32>::of(&call.shift).all(), Rows::<f32>::of(&call.scale).all(), call.factor);
    write_rows(threads, &call.x, 3, |_, x| {
        for ((x, shift), scale) in x.iter_mut().zip(shift).zip(scale) {
            *x = (*x * factor - shift) * scale;
        }
    });
}
