//! Launches of attention: many rows on tensor cores, single rows split over their pasts.

use super::{
    Cuda,
    launch::{Extent, arguments, count},
};
use crate::{KernelError, ops};

/// Query vectors of a tile, and threads that work on it.
const TILE_QUERIES: usize = 64;
const TILE_THREADS: usize = 128;

pub(super) fn paged(cuda: &Cuda, call: ops::attention_paged::Call<'_>) -> Result<(), KernelError> {
    prefill(cuda, &call, 0)
}

/// Tiles of queries, at most: each sequence but for the first may begin another.
fn tiles(vectors: usize, sequences: usize) -> usize {
    (vectors + (TILE_QUERIES - 1) * sequences) / TILE_QUERIES
}

/// The sequences from `first_sequence` on.
fn prefill(cuda: &Cuda, call: &ops::attention_paged::Call<'_>, first_sequence: usize) -> Result<(), KernelError> {
    let shape = call.layer.shape;
    let sequences = call.sequences.context_lengths.rows();
    // Each of the first has one row.
    let (rows, left) = (call.queries.rows() - first_sequence, sequences - first_sequence);
    if rows == 0 || left == 0 {
        return Ok(());
    }
    let extent = Extent::line(shape.kv_heads * tiles(rows * (call.heads / shape.kv_heads), left), TILE_THREADS);
    let arguments = arguments![
        call.out.address(),
        call.queries.address(),
        call.layer.address,
        call.sequences.query_starts.address(),
        call.sequences.context_lengths.address(),
        call.sequences.block_tables.address(),
        count(call.out.pitch()),
        count(call.queries.pitch()),
        count(call.queries.rows()),
        count(sequences),
        count(first_sequence),
        count(call.heads),
        count(shape.kv_heads),
        count(call.layer.blocks),
        count(call.sequences.block_tables.columns()),
        call.scale,
    ];
    let kernel = format!("{}_d{}", cuda.kernel("attention_paged"), shape.head_dim);
    // SAFETY: these are the kernel's parameters, and the front has checked the shapes.
    unsafe { cuda.launch(&kernel, extent, arguments) }
}

pub(super) fn packed(cuda: &Cuda, call: ops::attention_packed::Call<'_>) -> Result<(), KernelError> {
    let stretches = call.starts.rows() - 1;
    let extent = Extent::line(call.heads * tiles(call.qkv.rows(), stretches), TILE_THREADS);
    let arguments = arguments![
        call.out.address(),
        call.qkv.address(),
        call.starts.address(),
        count(call.out.pitch()),
        count(call.qkv.pitch()),
        count(call.qkv.rows()),
        count(stretches),
        count(call.heads),
        call.scale,
    ];
    let kernel = format!("{}_d{}", cuda.kernel("attention_packed"), call.head_dim);
    // SAFETY: as above.
    unsafe { cuda.launch(&kernel, extent, arguments) }
}
