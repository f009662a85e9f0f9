//! Launches of attention: many rows on tensor cores, and single rows split along their contexts.

use super::{
    Cuda,
    decode_launch::DecodeLaunch,
    launch::{Arguments, Extent, arguments, count},
    linear_few,
    target::HOPPER_TILE,
    tensor_map::{Layout, Swizzle, TensorMap},
};
use crate::{BLOCK_TOKENS, DType, KernelError, Tensor, ops};

/// Query vectors per tile, and threads per tile, on devices without a kernel of their own.
const TILE_QUERIES: usize = 64;
const TILE_THREADS: usize = 128;

/// Most rows of a stretch that fit in one tile.
const WINDOW_ROWS: usize = 64;

/// A Hopper kernel: query vectors per tile, threads, and bytes of shared memory.
struct Hopper {
    queries: usize,
    threads: usize,
    shared: usize,
}

/// Over the cache, for heads of 128.
const HOPPER_PAGED: Hopper = Hopper { queries: HOPPER_TILE, threads: 384, shared: 196_608 };

/// Fewest keys in one part of a split tile; with fewer, the second launch costs more than it saves.
const SPLIT_KEYS: usize = 512;

/// Warps per block of the kernel that merges parts; each merges one query vector.
const COMBINE_WARPS: usize = 8;

/// Over packed rows, for heads of 80.
const HOPPER_PACKED: Hopper = Hopper { queries: 192, threads: 512, shared: 133_120 };

impl Hopper {
    /// As many blocks as run at once, at most; each takes one job after another.
    fn extent(&self, jobs: usize, processors: usize) -> Extent {
        Extent { grid: [jobs.min(processors), 1, 1], block: [self.threads, 1], shared: self.shared }
    }
}

/// An upper bound on tiles of queries: each sequence after the first may start a new tile.
fn tiles(tile: usize, vectors: usize, sequences: usize) -> usize {
    (vectors + (tile - 1) * sequences) / tile
}

/// Flags of `attention_decode.cu`: the context was written before this step; and the weights are the first to be
/// evicted from the L2 cache, so keys and values should be too.
const PAST_IS_THERE: u32 = 1;
const OTHERS_READ_ONCE: u32 = 2;

/// Counters in `attention_decode.cu`, one per worker.
const DECODE_COUNTERS: usize = 2048;

pub(super) fn paged(cuda: &Cuda, call: ops::attention_paged::Call<'_>) -> Result<(), KernelError> {
    let singles = call.sequences.single_rows;
    if singles > 0 {
        decode(cuda, &call, singles)?;
    }
    prefill(cuda, &call, singles)
}

/// Decodes the first `sequences`, which have one row each.
fn decode(cuda: &Cuda, call: &ops::attention_paged::Call<'_>, sequences: usize) -> Result<(), KernelError> {
    let (shape, group) = (call.layer.shape, call.heads / call.layer.shape.kv_heads);
    let (processors, shared_most) = (cuda.kernels.target.processors, cuda.kernels.functions.shared_most());
    let ring = match shape.head_dim {
        64 | 128 => 24_576,
        80 => 20_480,
        _ => 12_288,
    };
    let launch =
        DecodeLaunch::of(sequences, call.heads, shape.kv_heads, processors).within(shared_most, ring, processors);
    let partials = launch.part_numbers(shape.head_dim) * DType::F32.size();
    assert!(partials <= call.scratch.bytes().as_usize(), "the target declares what decoding takes");
    assert!(launch.workers <= DECODE_COUNTERS, "no device has so many multiprocessors");
    // A step of single rows alone writes no key that another sequence has in its context, so contexts are read early.
    let past_is_there = sequences == call.sequences.context_lengths.rows();
    // Our products of few rows mark their weights for first eviction.
    let others_read_once = call.queries.rows() <= linear_few::ROWS_MAX && cuda.kernels.functions.is_machine_code();
    let flags = u32::from(past_is_there) * PAST_IS_THERE + u32::from(others_read_once) * OTHERS_READ_ONCE;
    let arguments = arguments![
        call.queries.address(),
        count(call.queries.pitch()),
        count(sequences),
        call.layer.address,
        count(call.layer.blocks),
        count(shape.kv_heads),
        count(group),
        call.sequences.query_starts.address(),
        call.sequences.context_lengths.address(),
        call.sequences.block_tables.address(),
        count(sequences),
        count(call.sequences.block_tables.columns()),
        call.scale,
        launch.piece,
        flags,
        call.scratch.address(),
        cuda.kernels.decode_counters,
        call.out.address(),
    ];
    let extent = Extent { grid: [launch.workers, 1, 1], block: [32 * launch.warps, 1], shared: launch.warps * ring };
    let kernel = format!("{}_d{}", cuda.kernel("attention_decode"), shape.head_dim);
    // SAFETY: these are the kernel's parameters, and the front has checked the shapes.
    unsafe { cuda.launch(&kernel, extent, arguments) }
}

/// Computes the sequences from `first_sequence` on.
fn prefill(cuda: &Cuda, call: &ops::attention_paged::Call<'_>, first_sequence: usize) -> Result<(), KernelError> {
    let (shape, processors) = (call.layer.shape, cuda.kernels.target.processors);
    let sequences = call.sequences.context_lengths.rows();
    // Each sequence before `first_sequence` has one row.
    let (rows, left) = (call.queries.rows() - first_sequence, sequences - first_sequence);
    if rows == 0 || left == 0 {
        return Ok(());
    }
    let vectors = rows * (call.heads / shape.kv_heads);
    let is_hopper = shape.head_dim == 128 && cuda.kernels.functions.is_machine_code();
    let jobs = shape.kv_heads * tiles(HOPPER_PAGED.queries, vectors, left);
    let keys = (call.sequences.query_key_pairs / call.queries.rows() as u64) as usize;
    let splits = (processors / jobs).min(keys / SPLIT_KEYS);
    let is_split = is_hopper && splits > 1;
    let (arguments, op, extent) = if is_hopper {
        let arguments = arguments![cache_map(call)?, call.out.address(), call.queries.address()];
        let op = if is_split { "attention_paged_hopper_split" } else { "attention_paged_hopper" };
        (arguments, op, HOPPER_PAGED.extent(if is_split { jobs * splits } else { jobs }, processors))
    } else {
        let arguments = arguments![call.out.address(), call.queries.address(), call.layer.address];
        let blocks = shape.kv_heads * tiles(TILE_QUERIES, vectors, left);
        (arguments, "attention_paged", Extent::line(blocks, TILE_THREADS))
    };
    let mut arguments = arguments
        .with(call.sequences.query_starts.address())
        .with(call.sequences.context_lengths.address())
        .with(call.sequences.block_tables.address());
    if is_split {
        let parts = jobs * splits * HOPPER_TILE * (shape.head_dim + 2) * DType::F32.size();
        assert!(parts <= call.scratch.bytes().as_usize(), "the target declares what split tiles take");
        arguments = arguments.with(call.scratch.address());
    }
    arguments = arguments
        .with(count(call.out.pitch()))
        .with(count(call.queries.pitch()))
        .with(count(call.queries.rows()))
        .with(count(sequences))
        .with(count(first_sequence))
        .with(count(call.heads))
        .with(count(shape.kv_heads))
        .with(count(call.layer.blocks))
        .with(count(call.sequences.block_tables.columns()));
    if is_split {
        arguments = arguments.with(count(splits));
    }
    let kernel = format!("{}_d{}", cuda.kernel(op), shape.head_dim);
    // SAFETY: these are the kernel's parameters, and the front has checked the shapes.
    unsafe { cuda.launch(&kernel, extent, arguments.with(call.scale)) }?;
    match is_split {
        true => combine(cuda, call, first_sequence, jobs, splits),
        false => Ok(()),
    }
}

/// Merges the parts of split tiles.
fn combine(
    cuda: &Cuda,
    call: &ops::attention_paged::Call<'_>,
    first_sequence: usize,
    jobs: usize,
    splits: usize,
) -> Result<(), KernelError> {
    let arguments = arguments![
        call.out.address(),
        call.scratch.address(),
        call.sequences.query_starts.address(),
        call.sequences.context_lengths.address(),
        count(call.out.pitch()),
        count(call.queries.rows()),
        count(call.sequences.context_lengths.rows()),
        count(first_sequence),
        count(call.heads),
        count(call.layer.shape.kv_heads),
        count(call.sequences.block_tables.columns()),
        count(splits),
        call.scale,
    ];
    let kernel = format!("{}_d{}", cuda.kernel("attention_paged_combine"), call.layer.shape.head_dim);
    let extent = Extent::line(jobs * (HOPPER_TILE / COMBINE_WARPS), 32 * COMBINE_WARPS);
    // SAFETY: as above.
    unsafe { cuda.launch(&kernel, extent, arguments) }
}

/// The cache as the copy engine sees it: one piece is the keys or values of sixteen tokens of one head.
fn cache_map(call: &ops::attention_paged::Call<'_>) -> Result<TensorMap, KernelError> {
    let shape = call.layer.shape;
    let pieces = (call.layer.blocks * 2 * shape.kv_heads) as u64;
    let layout = Layout {
        // Columns of half a head, eight tokens, halves, the next eight tokens, pieces.
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
        let jobs = call.heads * tiles(HOPPER_PACKED.queries, rows, stretches);
        (arguments, "attention_packed_hopper", HOPPER_PACKED.extent(jobs, cuda.kernels.target.processors))
    } else {
        let blocks = call.heads * tiles(TILE_QUERIES, rows, stretches);
        (plain(), "attention_packed", Extent::line(blocks, TILE_THREADS))
    };
    let kernel = format!("{}_d{}", cuda.kernel(op), call.head_dim);
    // SAFETY: as above.
    unsafe { cuda.launch(&kernel, extent, places(arguments)) }
}

/// Packed rows as the copy engine sees them: one copy is 112 rows of one head.
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
