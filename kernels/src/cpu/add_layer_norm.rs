//! Residual addition followed by layer normalisation.

use super::{layer_norm::layer_norm, residual, threads::Threads};
use crate::ops::{add_layer_norm::Call, layer_norm};

pub(super) fn add_layer_norm(threads: &Threads, call: Call<'_>) {
    let Call { x, residual, weight, bias, epsilon, out } = call;
    residual::add(threads, &x, &residual);
    self::layer_norm(threads, layer_norm::Call { x: residual, weight, bias, epsilon, out });
}
