//! Embedding.

use super::{
    memory::{indices, widen, write_rows},
    threads::Threads,
};
use crate::ops::embed::Call;

pub(super) fn embed(threads: &Threads, call: Call<'_>) {
    let ids = indices(&call.ids);
    write_rows(threads, &call.out, 1, |token, out| widen(&call.table, ids[token] as usize, out));
}
