//! The gate of a gated MLP.

use super::{arithmetic::silu, gelu::gelu_tanh, memory::Rows, quantize::write_activations, threads::Threads};
use crate::calls::{GateActivation, GateMul};

pub(super) fn gate_mul(threads: &Threads, call: GateMul<'_>) {
    match call.activation {
        GateActivation::Silu => apply(threads, &call, 8, silu),
        GateActivation::GeluTanh => apply(threads, &call, 12, gelu_tanh),
    }
}

/// `cost` is the relative cost of one element.
fn apply(threads: &Threads, call: &GateMul<'_>, cost: usize, unit: impl Fn(f32) -> f32 + Sync + Copy) {
    let (gates, ups) = (Rows::<f32>::of(&call.gate), Rows::<f32>::of(&call.up));
    write_activations(threads, &call.out, cost, |row| {
        let (gate, up) = (gates.row(row), ups.row(row));
        move |first: usize, out: &mut [f32]| {
            for ((out, gate), up) in out.iter_mut().zip(&gate[first..]).zip(&up[first..]) {
                *out = unit(*gate) * up;
            }
        }
    });
}
