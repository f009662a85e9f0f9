//! Addition to a residual.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::Tensor;

/// `residual = residual + x`, rounded to the residual's type.
pub(super) fn add(threads: &Threads, x: &Tensor<'_>, residual: &Tensor<'_>) {
    let x = Rows::<f32>::of(x);
    write_rows(threads, residual, 1, |row, residual| {
        for (residual, x) in residual.iter_mut().zip(x.row(row)) {
            *residual += x;
        }
    });
}
