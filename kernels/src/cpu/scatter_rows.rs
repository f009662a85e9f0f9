//! Writes rows to chosen places.

use super::{
    memory::{Output, Rows, indices},
    threads::Threads,
};
use crate::ops::scatter_rows::Call;

pub(super) fn scatter_rows(threads: &Threads, call: Call<'_>) {
    let (x, rows, columns) = (Rows::<f32>::of(&call.x), indices(&call.rows), call.x.columns());
    let mut taken = vec![false; call.out.rows()];
    for target in rows {
        let target = *target as usize;
        assert!(target < taken.len(), "row {target} of {}", taken.len());
        assert!(!std::mem::replace(&mut taken[target], true), "row {target} is named twice");
    }
    let out = Output::of(&call.out);
    threads.share(rows.len(), rows.len() * columns, |_, source| {
        // SAFETY: no place is named twice.
        unsafe { out.part(rows[source] as usize, 0, columns) }.copy_from_slice(x.row(source));
    });
}
