//! Gathering of rows by index.

use super::{
    memory::{Rows, indices, write_rows},
    threads::Threads,
};
use crate::calls::GatherRows;

pub(super) fn gather_rows(threads: &Threads, call: GatherRows<'_>) {
    let (x, rows) = (Rows::<f32>::of(&call.x), call.rows.as_ref().map(indices));
    let from = |row: usize| rows.map_or(row, |rows| rows[row] as usize);
    write_rows(threads, &call.out, 1, |row, out| out.copy_from_slice(x.row(from(row))));
}
