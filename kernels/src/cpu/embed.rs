//! Embedding: one row of a table per id.

use super::{
    memory::{indices, widen, write_rows},
    threads::Threads,
};
use crate::{
    InputToken,
    ops::{argmax::NO_CHOICE, embed::Call},
};

pub(super) fn embed(threads: &Threads, call: Call<'_>) {
    let (ids, previous) = (indices(&call.ids), indices(&call.previous));
    write_rows(threads, &call.out, 1, |token, out| match InputToken::of_code(ids[token]) {
        InputToken::Known(id) => widen(&call.table, id as usize, out),
        InputToken::Unseen(unseen) => {
            let row = unseen.row as usize;
            assert!(row < previous.len(), "row {row} of {} choices of the step before", previous.len());
            match previous[row] {
                NO_CHOICE => out.fill(0.0),
                id => widen(&call.table, id as usize, out),
            }
        }
    });
}
