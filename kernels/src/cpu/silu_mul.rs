//! The gate of a gated MLP.

use super::{
    arithmetic::exp,
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::ops::silu_mul::Call;

pub(super) fn silu_mul(threads: &Threads, call: Call<'_>) {
    let gate_up = Rows::<f32>::of(&call.gate_up);
    write_rows(threads, &call.out, 8, |row, out| {
        let (gate, up) = gate_up.row(row).split_at(out.len());
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    });
}
