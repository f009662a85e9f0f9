//! The index of each row's largest element.

use std::slice;

use super::{
    memory::{Rows, start_of},
    threads::Threads,
};
use crate::calls::{Argmax, NO_CHOICE};

pub(super) fn argmax(_: &Threads, call: Argmax<'_>) {
    let x = Rows::<f32>::of(&call.x);
    // SAFETY: the op layer allocated `out` as `[rows]` u32 for this call, and nothing else accesses
    // it during the call.
    let out = unsafe { slice::from_raw_parts_mut(start_of::<u32>(&call.out), call.out.rows()) };
    // SAFETY: the op layer has checked that `ids` is `[columns]` u32 and contiguous, and nothing writes
    // it during the call.
    let ids = call.ids.as_ref().map(|ids| unsafe { slice::from_raw_parts(start_of::<u32>(ids), ids.rows()) });
    for (row, out) in out.iter_mut().enumerate() {
        let numbers = x.row(row).iter().enumerate().filter(|(_, value)| !value.is_nan());
        let best = numbers.reduce(|best, next| if next.1 > best.1 { next } else { best });
        *out = best.map_or(NO_CHOICE, |(column, _)| ids.map_or(column as u32, |ids| ids[column]));
    }
}
