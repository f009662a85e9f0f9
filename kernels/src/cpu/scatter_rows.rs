//! Writes rows to chosen places.

use super::{
    memory::{Output, Rows, assert_places, indices},
    threads::Threads,
};
use crate::ops::scatter_rows::Call;

pub(super) fn scatter_rows(threads: &Threads, call: Call<'_>) {
    let (x, rows, columns) = (Rows::<f32>::of(&call.x), indices(&call.rows), call.x.columns());
    assert_places(rows, call.out.rows());
    let out = Output::of(&call.out);
    threads.share(rows.len(), rows.len() * columns, |_, source| {
        // SAFETY: no place is named twice.
        unsafe { out.part(rows[source] as usize, 0, columns) }.copy_from_slice(x.row(source));
    });
}
