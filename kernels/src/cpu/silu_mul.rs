//! The gate of a gated MLP.

use super::{arithmetic::silu, memory::Rows, quantize::write_activations, threads::Threads};
use crate::calls::SiluMul;

pub(super) fn silu_mul(threads: &Threads, call: SiluMul<'_>) {
    let (gate_up, columns) = (Rows::<f32>::of(&call.gate_up), call.out.columns());
    write_activations(threads, &call.out, 8, |row| {
        let (gate, up) = gate_up.row(row).split_at(columns);
        move |first: usize, out: &mut [f32]| {
            for ((out, gate), up) in out.iter_mut().zip(&gate[first..]).zip(&up[first..]) {
                *out = silu(*gate) * up;
            }
        }
    });
}
