//! The Gaussian error linear unit.

use std::f32::consts::FRAC_1_SQRT_2;

use super::{memory::write_rows, threads::Threads};
use crate::ops::gelu::Call;

pub(super) fn gelu(threads: &Threads, call: Call<'_>) {
    write_rows(threads, &call.x, 32, |_, x| {
        for x in x {
            *x = 0.5 * *x * (1.0 + libm::erff(*x * FRAC_1_SQRT_2));
        }
    });
}
