//! Addition of rows at given indices.

use super::{
    memory::{Output, Rows, assert_places, indices},
    threads::Threads,
};
use crate::calls::AddRows;

pub(super) fn add_rows(threads: &Threads, call: AddRows<'_>) {
    let (x, from, to) = (Rows::<f32>::of(&call.x), indices(&call.from), indices(&call.to));
    assert_places(to, call.out.rows());
    let (out, columns) = (Output::of(&call.out), call.out.columns());
    threads.share(to.len(), to.len() * columns, |_, chosen| {
        let added = x.row(from[chosen] as usize);
        // SAFETY: `assert_places` has checked that no index occurs twice in `to`, so no two threads
        // write the same row.
        let sum = unsafe { out.part(to[chosen] as usize, 0, columns) };
        sum.iter_mut().zip(added).for_each(|(sum, added)| *sum += added);
    });
}
