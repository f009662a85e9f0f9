//! A residual's addition and root-mean-square normalisation.

use super::{
    memory::{Rows, write_rows},
    rms_norm::rms_norm,
    threads::Threads,
};
use crate::ops::{add_rms_norm, rms_norm};

pub(super) fn add_rms_norm(threads: &Threads, call: add_rms_norm::Call<'_>) {
    let x = Rows::<f32>::of(&call.x);
    write_rows(threads, &call.residual, 1, |row, residual| {
        for (residual, x) in residual.iter_mut().zip(x.row(row)) {
            *residual += x;
        }
    });
    let add_rms_norm::Call { residual, weight, epsilon, out, .. } = call;
    self::rms_norm(threads, rms_norm::Call { x: residual, weight, epsilon, out });
}
