//! Rotary embedding of queries and keys, and the write of keys and values into KV cache blocks.

use std::slice;

use super::{
    memory::{Rows, indices, widened, write_rows},
    rotary::{inverse_root_mean_square, normalize_head, turn},
    threads::Threads,
};
use crate::{
    BLOCK_TOKENS, E4m3, Element, KvLayer,
    calls::{CachedValues, HeadNorms, NO_SLOT, RotaryKvWrite},
};

/// Keys or values, in the order of a block.
const KEYS: usize = 0;
const VALUES: usize = 1;

pub(super) fn rotary_kv_write(threads: &Threads, call: RotaryKvWrite<'_>) {
    let shape = call.layer.shape;
    // The values may be the keys before their norm and rotation.
    write_half(&call, VALUES);
    if let Some(norms) = call.norms {
        normalize(threads, &call, norms);
    }
    let heads = (call.heads + shape.kv_heads, shape.head_dim);
    turn(threads, &call.qkv, heads, &call.positions, &call.frequencies, call.axes);
    write_half(&call, KEYS);
}

/// Writes keys or values to their slots.
fn write_half(call: &RotaryKvWrite<'_>, half: usize) {
    match &call.scales {
        None => write(call, half, |_, x| x),
        Some(scales) => {
            let scales = Rows::<f32>::of(scales).all();
            write(call, half, |head, x| E4m3::from_f32(x / scales[head]));
        }
    }
}

/// Writes keys or values to their slots. `stored(head, x)` converts a number for storage. Heads
/// are numbered over all key heads, followed by all value heads.
fn write<E: Element>(call: &RotaryKvWrite<'_>, half: usize, stored: impl Fn(usize, f32) -> E) {
    let shape = call.layer.shape;
    let rows = Rows::<f32>::of(&call.qkv);
    let values = call.norms.map_or(CachedValues::Unchanged, |norms| norms.values);
    let heads_before = call.heads + if values == CachedValues::NormalizedKeys { 0 } else { half * shape.kv_heads };
    for (row, slot) in indices(&call.slots).iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT) {
        let (block, token) = (*slot as usize / BLOCK_TOKENS, *slot as usize % BLOCK_TOKENS);
        let source = &rows.row(row)[heads_before * shape.head_dim..];
        for (head, vector) in source.chunks_exact(shape.head_dim).take(shape.kv_heads).enumerate() {
            let norm = call.norms.filter(|_| half == VALUES && values != CachedValues::Unchanged);
            let scale = norm.map_or(1.0, |norm| inverse_root_mean_square(vector, norm.epsilon));
            // SAFETY: the layer's creator guarantees that only this lane uses the layer, and
            // this code runs on the lane.
            let vectors = unsafe {
                slice::from_raw_parts_mut(place::<E>(call.layer, block, half, head), BLOCK_TOKENS * shape.head_dim)
            };
            let to = &mut vectors[token * shape.head_dim..][..shape.head_dim];
            to.iter_mut().zip(vector).for_each(|(to, x)| *to = stored(half * shape.kv_heads + head, *x * scale));
        }
    }
}

/// Normalizes each query and key head by its root mean square.
fn normalize(threads: &Threads, call: &RotaryKvWrite<'_>, norms: &HeadNorms<'_>) {
    let shape = call.layer.shape;
    let (query, key) = (widened(&norms.query), widened(&norms.key));
    write_rows(threads, &call.qkv, 4, |_, row| {
        for (head, x) in row.chunks_exact_mut(shape.head_dim).take(call.heads + shape.kv_heads).enumerate() {
            let weight = if head < call.heads { &query } else { &key };
            normalize_head(x, weight, norms.weight_offset, norms.epsilon);
        }
    });
}

/// Returns the sixteen keys (half 0) or values (half 1) of one head in a block.
///
/// # Safety
/// Nothing writes the layer while the slice is alive.
pub(super) unsafe fn cached<E: Element>(layer: &KvLayer, block: usize, half: usize, head: usize) -> &[E] {
    // SAFETY: the layer's creator guarantees that its memory is valid, and the caller guarantees
    // that nothing writes it.
    unsafe { slice::from_raw_parts(place::<E>(layer, block, half, head), BLOCK_TOKENS * layer.shape.head_dim) }
}

/// Returns the address of the sixteen keys (half 0) or values (half 1) of one head in a block.
/// Panics if an index is out of bounds.
fn place<E: Element>(layer: &KvLayer, block: usize, half: usize, head: usize) -> *mut E {
    let shape = layer.shape;
    assert!(block < layer.blocks, "block {block} of a layer of {} blocks", layer.blocks);
    assert!(
        half < 2 && head < shape.kv_heads && shape.dtype == E::DTYPE,
        "half {half} or head {head} does not match {shape:?}"
    );
    let vector = ((block * 2 + half) * shape.kv_heads + head) * BLOCK_TOKENS;
    layer.address.offset(shape.dtype.bytes(vector * shape.head_dim)).0 as *mut E
}
