//! Layer normalization.

use super::{
    arithmetic::{dot, sum},
    memory::{Rows, widened, write_rows},
    threads::Threads,
};
use crate::calls::LayerNorm;

pub(super) fn layer_norm(threads: &Threads, call: LayerNorm<'_>) {
    let (x, weight, bias) = (Rows::<f32>::of(&call.x), widened(&call.weight), widened(&call.bias));
    write_rows(threads, &call.out, 4, |row, out| {
        let x = x.row(row);
        let mean = sum(x) / x.len() as f32;
        for (out, x) in out.iter_mut().zip(x) {
            *out = x - mean;
        }
        // The rounding error of the mean matters if the elements are almost equal.
        let mean_error = sum(out) / x.len() as f32;
        out.iter_mut().for_each(|out| *out -= mean_error);
        let variance = dot(out, out) / x.len() as f32;
        let factor = (variance + call.epsilon).sqrt().recip();
        for ((out, weight), bias) in out.iter_mut().zip(&weight).zip(&bias) {
            *out = *out * factor * weight + bias;
        }
    });
}
