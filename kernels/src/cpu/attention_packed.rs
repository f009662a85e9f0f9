//! Bidirectional attention within packed ranges of rows ("sequences").

use super::{
    attention::{Tile, Vectors},
    memory::{Output, Rows, Scratch, indices},
    threads::Threads,
};
use crate::{
    calls::AttentionPacked,
    target::{CPU_TILE_KEYS, CPU_TILE_QUERIES, cpu_attention_tile},
};

pub(super) fn attention_packed(threads: &Threads, call: AttentionPacked<'_>) {
    let (heads, head_dim) = (call.heads, call.head_dim);
    let (qkv, starts) = (Rows::<f32>::of(&call.qkv), indices(&call.starts));
    assert_packed(starts, call.out.rows());
    // For each tile of queries: the first row of its sequence, the end of its sequence, and the
    // tile's first row.
    let tiles: Vec<(usize, usize, usize)> = starts
        .windows(2)
        .map(|bounds| (bounds[0] as usize, bounds[1] as usize))
        .flat_map(|(first, end)| (first..end).step_by(CPU_TILE_QUERIES).map(move |query| (first, end, query)))
        .collect();
    let cost: usize = tiles.iter().map(|(first, end, _)| (end - first) * CPU_TILE_QUERIES * 2 * heads * head_dim).sum();
    let (out, scratch) = (Output::of(&call.out), Scratch::of(&call.scratch, cpu_attention_tile(head_dim)));
    threads.share(tiles.len() * heads, cost, |worker, item| {
        let ((first, end, query), head) = (tiles[item / heads], item % heads);
        let queries = query..end.min(query + CPU_TILE_QUERIES);
        // Column of the head's vector in a row. Part 0 is queries, part 1 keys, part 2 values.
        let place = |part: usize| (part * heads + head) * head_dim;
        // SAFETY: a worker processes one item at a time, so nothing else
        // uses this worker's scratch.
        let Tile { mut running, .. } = Tile::over(unsafe { scratch.of_worker(worker) }, head_dim);
        running.start(queries.clone().map(|row| &qkv.row(row)[place(0)..][..head_dim]), call.scale);
        for start in (first..end).step_by(CPU_TILE_KEYS) {
            let rows = start..end.min(start + CPU_TILE_KEYS);
            let vectors =
                |part| Vectors { elements: qkv.span(rows.clone(), place(part), head_dim), pitch: qkv.pitch() };
            running.fold(rows.len(), vectors(1), vectors(2), |_| 0..rows.len());
        }
        for (index, row) in queries.enumerate() {
            // SAFETY: no other item has these rows and this head, so no other
            // thread writes these elements.
            running.finish(index, unsafe { out.part(row, head * head_dim, head_dim) });
        }
    });
}

/// Panics unless the sequences cover every row exactly once, in order.
fn assert_packed(starts: &[u32], rows: usize) {
    assert_eq!(starts.first().copied(), Some(0), "the sequences start with the first row");
    assert_eq!(starts.last().map(|end| *end as usize), Some(rows), "the sequences end with the last row");
    assert!(starts.is_sorted(), "the sequences follow each other");
}
