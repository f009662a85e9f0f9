//! Launches of attention: many rows on tensor cores, single rows split over their pasts.

use super::{
    Cuda,
    launch::{Arguments, Extent, arguments, count},
    tensor_map::{Layout, Swizzle, TensorMap},
};
use crate::{BLOCK_TOKENS, KernelError, Tensor, ops};

/// Query vectors of a tile, and threads that work on it, where no kernel is made for the device.
const TILE_QUERIES: usize = 64;
const TILE_THREADS: usize = 128;

/// Rows of a stretch that one tile holds.
const WINDOW_ROWS: usize = 64;

/// A kernel of Hopper's: its tile, its threads and its shared memory.
struct Hopper {
    queries: usize,
    threads: usize,
    shared: usize,
}

/// Over the cache, heads of 128.
const HOPPER_PAGED: Hopper = Hopper { queries: 128, threads: 384, shared: 196_608 };

/// Over packed rows, heads of 80.
const HOPPER_PACKED: Hopper = Hopper { queries: 192, threads: 512, shared: 133_120 };

impl Hopper {
    /// As many blocks as run at once; each takes one tile after the other.
    fn extent(&self, cuda: &Cuda, heads: usize, vectors: usize, sequences: usize) -> Extent {
        let blocks = (heads * tiles(self.queries, vectors, sequences)).min(cuda.kernels.target.processors);
        Extent { grid: [blocks, 1, 1], block: [self.threads, 1], shared: self.shared }
    }
}

/// Tiles of queries, at most: each sequence but for the first may begin another.
fn tiles(tile: usize, vectors: usize, sequences: usize) -> usize {
    (vectors + (tile - 1) * sequences) / tile
}

pub(super) fn paged(cuda: &Cuda, call: ops::attention_paged::Call<'_>) -> Result<(), KernelError> {
    prefill(cuda, &call, 0)
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
    let vectors = rows * (call.heads / shape.kv_heads);
    let is_hopper = shape.head_dim == 128 && cuda.kernels.functions.is_machine_code();
    let (arguments, op, extent) = match is_hopper {
        true => {
            let arguments = arguments![cache_map(call)?, call.out.address(), call.queries.address()];
            (arguments, "attention_paged_hopper", HOPPER_PAGED.extent(cuda, shape.kv_heads, vectors, left))
        }
        false => {
            let arguments = arguments![call.out.address(), call.queries.address(), call.layer.address];
            let blocks = shape.kv_heads * tiles(TILE_QUERIES, vectors, left);
            (arguments, "attention_paged", Extent::line(blocks, TILE_THREADS))
        }
    };
    let arguments = arguments
        .with(call.sequences.query_starts.address())
        .with(call.sequences.context_lengths.address())
        .with(call.sequences.block_tables.address())
        .with(count(call.out.pitch()))
        .with(count(call.queries.pitch()))
        .with(count(call.queries.rows()))
        .with(count(sequences))
        .with(count(first_sequence))
        .with(count(call.heads))
        .with(count(shape.kv_heads))
        .with(count(call.layer.blocks))
        .with(count(call.sequences.block_tables.columns()))
        .with(call.scale);
    let kernel = format!("{}_d{}", cuda.kernel(op), shape.head_dim);
    // SAFETY: these are the kernel's parameters, and the front has checked the shapes.
    unsafe { cuda.launch(&kernel, extent, arguments) }
}

/// The cache as the copy engine sees it: sixteen tokens of one head, keys or values, at a time.
fn cache_map(call: &ops::attention_paged::Call<'_>) -> Result<TensorMap, KernelError> {
    let shape = call.layer.shape;
    let pieces = (call.layer.blocks * 2 * shape.kv_heads) as u64;
    let layout = Layout {
        // Columns of a half, eight tokens, halves, the next eight tokens, pieces.
        dimensions: &[64, 8, 2, BLOCK_TOKENS as u64 / 8, pieces],
        strides: &[256, 128, 2048, 4096],
        cube: &[64, 8, 2, 2, 1],
        swizzle: Swizzle::Bytes128,
    };
    Ok(TensorMap::new(call.layer.address, shape.dtype, &layout)?)
}

pub(super) fn packed(cuda: &Cuda, call: ops::attention_packed::Call<'_>) -> Result<(), KernelError> {
    let (rows, stretches) = (call.qkv.rows(), call.starts.rows() - 1);
    if rows == 0 {
        return Ok(());
    }
    let is_hopper = call.head_dim == 80 && cuda.kernels.functions.is_machine_code();
    let places = |arguments: Arguments| {
        let arguments = arguments.with(call.starts.address()).with(count(call.out.pitch()));
        let arguments = arguments.with(count(call.qkv.pitch())).with(count(rows)).with(count(stretches));
        arguments.with(count(call.heads)).with(call.scale)
    };
    let plain = || arguments![call.out.address(), call.qkv.address()];
    let (arguments, op, extent) = if call.longest <= WINDOW_ROWS && call.head_dim <= 80 {
        (plain(), "attention_windows", Extent::line(call.heads * stretches, TILE_THREADS))
    } else if is_hopper {
        let arguments = arguments![packed_map(&call.qkv, call.heads)?, call.out.address(), call.qkv.address()];
        (arguments, "attention_packed_hopper", HOPPER_PACKED.extent(cuda, call.heads, rows, stretches))
    } else {
        let blocks = call.heads * tiles(TILE_QUERIES, rows, stretches);
        (plain(), "attention_packed", Extent::line(blocks, TILE_THREADS))
    };
    let kernel = format!("{}_d{}", cuda.kernel(op), call.head_dim);
    // SAFETY: as above.
    unsafe { cuda.launch(&kernel, extent, places(arguments)) }
}

/// Packed rows as the copy engine sees them: 112 rows of one head at a time.
fn packed_map(qkv: &Tensor<'_>, heads: usize) -> Result<TensorMap, KernelError> {
    let layout = Layout {
        // Columns of a fifth of a head, rows, fifths.
        dimensions: &[16, qkv.rows() as u64, 15 * heads as u64],
        strides: &[2 * qkv.pitch() as u64, 32],
        cube: &[16, 112, 5],
        swizzle: Swizzle::Bytes32,
    };
    Ok(TensorMap::new(qkv.address(), qkv.dtype(), &layout)?)
}
