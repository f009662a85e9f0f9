//! Residual addition followed by root-mean-square normalisation.

use super::{residual, rms_norm::rms_norm, threads::Threads};
use crate::{
    Activations,
    ops::{add_rms_norm::Call, rms_norm},
};

pub(super) fn add_rms_norm(threads: &Threads, call: Call<'_>) {
    let Call { x, residual, weight, epsilon, out } = call;
    residual::add(threads, &x, &residual);
    self::rms_norm(threads, rms_norm::Call { x: residual, weight, epsilon, out: Activations::of_plain(out) });
}
