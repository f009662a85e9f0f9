//! Writes of rows to given indices.

use super::{
    memory::{Output, Rows, assert_places, indices},
    threads::Threads,
};
use crate::calls::ScatterRows;

pub(super) fn scatter_rows(threads: &Threads, call: ScatterRows<'_>) {
    let (x, rows, columns) = (Rows::<f32>::of(&call.x), indices(&call.rows), call.x.columns());
    assert_places(rows, call.out.rows());
    let out = Output::of(&call.out);
    threads.share(rows.len(), rows.len() * columns, |_, source| {
        // SAFETY: `assert_places` has checked that no index occurs twice in `rows`, so no two
        // threads write the same row.
        unsafe { out.part(rows[source] as usize, 0, columns) }.copy_from_slice(x.row(source));
    });
}
