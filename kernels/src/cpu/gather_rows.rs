//! Gathering of rows by index.

use super::{
    memory::{Rows, indices, write_rows},
    threads::Threads,
};
use crate::calls::GatherRows;

pub(super) fn gather_rows(threads: &Threads, call: GatherRows<'_>) {
    let (x, rows) = (Rows::<f32>::of(&call.x), indices(&call.rows));
    write_rows(threads, &call.out, 1, |row, out| out.copy_from_slice(x.row(rows[row] as usize)));
}
