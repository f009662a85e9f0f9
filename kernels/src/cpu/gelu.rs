//! The Gaussian error linear unit.

use std::f32::consts::FRAC_1_SQRT_2;

use super::{arithmetic::logistic, memory::write_rows, threads::Threads};
use crate::calls::{ApplyGelu, Gelu};

/// `2 * sqrt(2 / pi)`. In the tanh approximation, `(1 + tanh(y)) / 2` is the logistic function of
/// `2 * y`.
const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;

pub(super) fn gelu(threads: &Threads, call: ApplyGelu<'_>) {
    match call.kind {
        Gelu::Erf => apply(threads, call, 32, |x| 0.5 * x * (1.0 + libm::erff(x * FRAC_1_SQRT_2))),
        Gelu::Tanh => apply(threads, call, 12, gelu_tanh),
        Gelu::Quick => apply(threads, call, 8, |x| x * logistic(1.702 * x)),
    }
}

/// The tanh approximation of GELU.
#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    x * logistic(TWICE_SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x))
}

fn apply(threads: &Threads, call: ApplyGelu<'_>, cost: usize, unit: impl Fn(f32) -> f32 + Sync) {
    write_rows(threads, &call.x, cost, |_, x| x.iter_mut().for_each(|x| *x = unit(*x)));
}
