//! Embedding: one row of a table per token.

use super::{
    block_products::BlockWeight,
    memory::{indices, widen, write_rows},
    threads::Threads,
};
use crate::{
    InputToken, RankShard,
    calls::{Embed, NO_CHOICE},
};

pub(super) fn embed(threads: &Threads, call: Embed<'_>) {
    let (ids, previous) = (indices(&call.ids), indices(&call.previous));
    write_rows(threads, &call.out, 1, |token, out| match InputToken::of_code(ids[token]) {
        InputToken::Known(id) => look_up(&call, id, out),
        InputToken::Unseen(unseen) => {
            let row = unseen.row as usize;
            assert!(row < previous.len(), "row {row} of {} choices of the previous step", previous.len());
            match previous[row] {
                NO_CHOICE => out.fill(0.0),
                id => look_up(&call, id, out),
            }
        }
    });
}

/// Copies a token's row, scaled, or writes zeros if another rank holds it.
#[inline(always)]
fn look_up(call: &Embed<'_>, id: u32, out: &mut [f32]) {
    let (RankShard { first, count, whole }, id) = (call.tokens, id as usize);
    assert!(id < whole, "row {id} of {whole}");
    match id.checked_sub(first).filter(|row| *row < count) {
        Some(row) => {
            match BlockWeight::of(&call.table) {
                Some(table) => table.widen(row..row + 1, out),
                None => widen(&call.table.data, row, out),
            }
            if call.scale != 1.0 {
                out.iter_mut().for_each(|element| *element *= call.scale);
            }
        }
        None => out.fill(0.0),
    }
}
