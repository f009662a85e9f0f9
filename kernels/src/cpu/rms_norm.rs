//! Root-mean-square normalisation.

use super::{
    arithmetic::dot,
    memory::{Rows, widened, write_rows},
    threads::Threads,
};
use crate::ops::rms_norm::Call;

pub(super) fn rms_norm(threads: &Threads, call: Call<'_>) {
    let (x, weight) = (Rows::<f32>::of(&call.x), widened(&call.weight));
    write_rows(threads, &call.out, 2, |row, out| {
        let x = x.row(row);
        let factor = (dot(x, x) / x.len() as f32 + call.epsilon).sqrt().recip();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(&weight) {
            *out = x * factor * weight;
        }
    });
}
