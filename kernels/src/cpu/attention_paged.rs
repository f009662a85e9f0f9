//! Attention over the KV cache's blocks.

use std::ops::Range;

use super::{
    attention::{Gathered, Tile, Vectors},
    memory::{Output, Rows, Scratch, indices},
    rotary_kv_write::cached,
    threads::Threads,
};
use crate::{
    BLOCK_TOKENS, E4m3,
    calls::AttentionPaged,
    target::{CPU_TILE_KEYS, CPU_TILE_QUERIES, cpu_attention_tile},
};

/// Rows of one sequence and heads of one group, whose queries are processed together
/// over the same keys.
struct Item {
    sequence: usize,
    rows: Range<usize>,
    heads: Range<usize>,
    kv_head: usize,
    /// Number of tokens up to and including the first row's token. Each later row has one more
    /// token.
    context: usize,
}

/// The mask of a call: see [`AttentionMask`](crate::calls::AttentionMask).
#[derive(Clone, Copy)]
struct Mask<'m> {
    window: Option<usize>,
    key_ends: Option<&'m [u32]>,
}

impl Item {
    /// The tokens that row `row` of the item attends to.
    fn visible(&self, row: usize, mask: Mask<'_>) -> Range<usize> {
        let causal = self.context + row;
        let end = mask.key_ends.map_or(0, |ends| ends[self.rows.start + row] as usize);
        mask.window.map_or(0, |window| causal.saturating_sub(window))..causal.max(end)
    }
}

pub(super) fn attention_paged(threads: &Threads, call: AttentionPaged<'_>) {
    let (shape, head_dim) = (call.layer.shape, call.layer.shape.head_dim);
    let queries = Rows::<f32>::of(&call.queries);
    let tables = Rows::<u32>::of(&call.sequences.block_tables);
    let items = items(&call);
    let (out, scratch) = (Output::of(&call.out), Scratch::of(&call.scratch, cpu_attention_tile(head_dim)));
    fill_padding(&call, &out);
    let mask = Mask { window: call.window, key_ends: call.key_ends.as_ref().map(indices) };
    let keys = |item: &Item| item.visible(0, mask).len() + item.rows.len();
    let pairs: usize = items.iter().map(|item| keys(item) * item.rows.len() * item.heads.len()).sum();
    threads.share(items.len(), pairs * 2 * head_dim, |worker, item| {
        let item = &items[item];
        let (table, width) = (tables.row(item.sequence), item.heads.len());
        // Order of queries in a tile: all heads of the first row, then all heads of the
        // second, and so on.
        let place = |index: usize| (item.rows.start + index / width, (item.heads.start + index % width) * head_dim);
        let count = item.rows.len() * width;
        // SAFETY: a worker processes one item at a time, so nothing else
        // uses this worker's scratch.
        let Tile { mut running, mut gathered } = Tile::over(unsafe { scratch.of_worker(worker) }, head_dim);
        let query = |index| {
            let (row, column) = place(index);
            &queries.row(row)[column..][..head_dim]
        };
        running.start((0..count).map(query), call.scale);
        let first_key = item.visible(0, mask).start;
        let keys_end = item.visible(item.rows.len() - 1, mask).end;
        // Tiles start at multiples of their size even if there is a window. Otherwise the rounding
        // of a row would depend on the rows that are processed with it.
        let first_tile = first_key / CPU_TILE_KEYS * CPU_TILE_KEYS;
        for start in (first_tile..keys_end).step_by(CPU_TILE_KEYS) {
            let keys = start.max(first_key)..keys_end.min(start + CPU_TILE_KEYS);
            gather(&call, table, start, keys.clone(), item.kv_head, &mut gathered);
            let keys = keys.end - start;
            let vectors = |elements| Vectors { elements, pitch: head_dim };
            let visible = |query: usize| {
                let tokens = item.visible(query / width, mask);
                tokens.start.saturating_sub(start)..tokens.end.saturating_sub(start)
            };
            running.fold(keys, vectors(gathered.keys), vectors(gathered.values), visible);
        }
        for index in 0..count {
            let (row, column) = place(index);
            // SAFETY: no other item has these rows and these heads, so no other
            // thread writes these elements.
            running.finish(index, unsafe { out.part(row, column, shape.head_dim) });
        }
    });
}

/// Divides the work into items. Panics if the sequences are inconsistent.
fn items(call: &AttentionPaged<'_>) -> Vec<Item> {
    let starts = indices(&call.sequences.query_starts);
    let contexts = indices(&call.sequences.context_lengths);
    let table_tokens = call.sequences.block_tables.columns() * BLOCK_TOKENS;
    let group = call.heads / call.layer.shape.kv_heads;
    let heads_step = group.min(CPU_TILE_QUERIES);
    let rows_step = CPU_TILE_QUERIES / heads_step;
    let rows = call.queries.rows();
    let covers = starts[0] == 0 && starts[starts.len() - 1] as usize == rows;
    assert!(starts.is_sorted() && covers, "query_starts are {starts:?}; expected ascending values from 0 to {rows}");
    let mut items = Vec::new();
    for (sequence, (bounds, context)) in starts.windows(2).zip(contexts).enumerate() {
        let (first, end, context) = (bounds[0] as usize, bounds[1] as usize, *context as usize);
        if first == end || context == 0 {
            continue;
        }
        assert!(end - first <= context, "sequence {sequence} has {} rows in a context of {context}", end - first);
        let key_ends = call.key_ends.as_ref().map_or(&[][..], |ends| &indices(ends)[first..end]);
        let last_key = key_ends.iter().copied().max().unwrap_or(0) as usize;
        assert!(last_key <= context, "sequence {sequence} has a key end of {last_key} in a context of {context}");
        assert!(context <= table_tokens, "sequence {sequence} has a context of {context} in blocks for {table_tokens}");
        for row in (first..end).step_by(rows_step) {
            for kv_head in 0..call.layer.shape.kv_heads {
                for head in (0..group).step_by(heads_step) {
                    items.push(Item {
                        sequence,
                        rows: row..end.min(row + rows_step),
                        heads: kv_head * group + head..kv_head * group + group.min(head + heads_step),
                        kv_head,
                        context: context - (end - row) + 1,
                    });
                }
            }
        }
    }
    items
}

/// Writes zeros to the output rows of padding sequences, which have no context.
fn fill_padding(call: &AttentionPaged<'_>, out: &Output<'_>) {
    let starts = indices(&call.sequences.query_starts);
    let contexts = indices(&call.sequences.context_lengths);
    let padding = starts.windows(2).zip(contexts).filter(|(_, context)| **context == 0);
    for row in padding.flat_map(|(bounds, _)| bounds[0]..bounds[1]) {
        // SAFETY: no worker has started yet, so nothing else accesses the output.
        unsafe { out.part(row as usize, 0, call.out.columns()) }.fill(0.0);
    }
}

/// Copies the keys and values of `tokens` to the tile that starts at token `start`, the first of a
/// block. Blocks of the tile before `tokens` are not read, but replaced with zeros.
fn gather(
    call: &AttentionPaged<'_>,
    table: &[u32],
    start: usize,
    tokens: Range<usize>,
    head: usize,
    out: &mut Gathered<'_>,
) {
    let head_dim = call.layer.shape.head_dim;
    let step = BLOCK_TOKENS * head_dim;
    let halves = out.keys.chunks_mut(step).zip(out.values.chunks_mut(step));
    for ((first, (keys, values)), block) in
        (start..tokens.end).step_by(BLOCK_TOKENS).zip(halves).zip(&table[start / BLOCK_TOKENS..])
    {
        let elements = BLOCK_TOKENS.min(tokens.end - first) * head_dim;
        for (half, to) in [keys, values].into_iter().enumerate() {
            let to = &mut to[..elements];
            if first + BLOCK_TOKENS <= tokens.start {
                to.fill(0.0);
            } else {
                take(call, *block as usize, half, head, to);
            }
        }
    }
}

/// Copies the first `to.len()` elements of the keys (half 0) or values (half 1) of one
/// head in a block.
fn take(call: &AttentionPaged<'_>, block: usize, half: usize, head: usize, to: &mut [f32]) {
    let layer = call.layer;
    match &call.scales {
        // SAFETY: nothing writes the layer during the operation.
        None => to.copy_from_slice(&unsafe { cached::<f32>(layer, block, half, head) }[..to.len()]),
        Some(scales) => {
            let scale = Rows::<f32>::of(scales).all()[half * layer.shape.kv_heads + head];
            // SAFETY: nothing writes the layer during the operation.
            let from = unsafe { cached::<E4m3>(layer, block, half, head) };
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32() * scale);
        }
    }
}

const _: () = assert!(CPU_TILE_KEYS.is_multiple_of(BLOCK_TOKENS), "a tile of keys consists of whole blocks");
