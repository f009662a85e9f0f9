//! Means of consecutive rows.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::calls::MeanRows;

pub(super) fn mean_rows(threads: &Threads, call: MeanRows<'_>) {
    let x = Rows::<f32>::of(&call.x);
    let factor = (call.count as f32).recip();
    write_rows(threads, &call.out, call.count, |row, out| {
        out.fill(0.0);
        for of in row * call.count..(row + 1) * call.count {
            out.iter_mut().zip(x.row(of)).for_each(|(sum, x)| *sum += x);
        }
        out.iter_mut().for_each(|sum| *sum *= factor);
    });
}
