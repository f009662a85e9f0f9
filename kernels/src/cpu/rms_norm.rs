//! Root-mean-square normalization.

use super::{
    arithmetic::dot,
    memory::{Rows, widened, write_rows},
    quantize::write_activations,
    threads::Threads,
};
use crate::calls::{RmsNorm, RmsNormAdd};

pub(super) fn rms_norm(threads: &Threads, call: RmsNorm<'_>) {
    let (x, weight) = (Rows::<f32>::of(&call.x), widened(&call.weight));
    let (weight, epsilon, offset) = (&weight, call.epsilon, call.weight_offset);
    write_activations(threads, &call.out, 2, |row| {
        let x = x.row(row);
        let factor = (dot(x, x) / x.len() as f32 + epsilon).sqrt().recip();
        move |first: usize, out: &mut [f32]| {
            for ((out, x), weight) in out.iter_mut().zip(&x[first..]).zip(&weight[first..]) {
                *out = x * factor * (weight + offset);
            }
        }
    });
}

pub(super) fn rms_norm_add(threads: &Threads, call: RmsNormAdd<'_>) {
    let (x, weight) = (Rows::<f32>::of(&call.x), widened(&call.weight));
    let (epsilon, offset) = (call.epsilon, call.weight_offset);
    let times = call.factor.as_ref().map_or(1.0, |factor| Rows::<f32>::of(factor).all()[0]);
    write_rows(threads, &call.sum, 3, |row, sum| {
        let x = x.row(row);
        let factor = (dot(x, x) / x.len() as f32 + epsilon).sqrt().recip();
        for ((sum, x), weight) in sum.iter_mut().zip(x).zip(&weight) {
            *sum = (*sum + x * factor * (weight + offset)) * times;
        }
    });
}
