//! Launches of attention kernels. The prefill kernels compute sequences with several query rows.
//! The decode kernel computes sequences with a single query row, and may split a sequence along its
//! context.

use super::{
    arguments::{Arguments, Extent, address_or_null, arguments, count},
    contract::{
        self, HeadDim, HopperHeadDim, PackedHeadDim, PagedHopper, attention_decode, attention_hopper,
        attention_paged_hopper, attention_prefill,
    },
    decode_launch::DecodeLaunch,
    functions::Function,
    lane::Cuda,
    quantized_cache::quantized_cache,
    tensor_map::{Layout, Swizzle, TensorMap},
};
use crate::{BLOCK_TOKENS, DType, KernelError, Tensor, calls};

/// Returns the extent of the Hopper kernel for attention over the KV cache. The kernel is
/// persistent: it has at most as many thread blocks as the device runs at once, and each thread
/// block processes one job after another.
fn paged_extent(head_dim: HopperHeadDim, is_quantized: bool, jobs: usize, sms: usize) -> Extent {
    use attention_paged_hopper::{E4M3_SHARED_BYTES, E4M3_THREADS, THREADS, shared_bytes};
    let (threads, shared) =
        if is_quantized { (E4M3_THREADS, E4M3_SHARED_BYTES) } else { (THREADS, shared_bytes(head_dim)) };
    Extent { shared, ..Extent::line(jobs.min(sms), threads) }
}

/// Returns the head dimension and the Hopper kernels of a call, or `None` if there are no such
/// kernels.
fn paged_hopper(
    cuda: &Cuda,
    call: &calls::AttentionPaged<'_>,
) -> Result<Option<(HopperHeadDim, PagedHopper<Function>)>, KernelError> {
    let Some(hopper) = &cuda.entry_points().hopper else { return Ok(None) };
    let Some(head_dim) = HopperHeadDim::of(call.layer.shape.head_dim) else { return Ok(None) };
    let Some(quantized) = quantized_cache(cuda, "attention_paged", call.layer)? else {
        return Ok(Some((head_dim, hopper.attention_paged[head_dim])));
    };
    let has_kernels = head_dim.elements() == attention_paged_hopper::E4M3_HEAD_DIM;
    Ok(has_kernels.then_some((head_dim, quantized.attention_paged_hopper)))
}

/// Returns the extent of the Hopper kernel for attention within packed sequences. The kernel is
/// persistent: it has at most as many thread blocks as the device runs at once, and each thread
/// block processes one job after another.
fn packed_extent(head_dim: PackedHeadDim, jobs: usize, sms: usize) -> Extent {
    let (threads, shared) =
        (attention_hopper::packed_threads(head_dim), attention_hopper::packed_shared_bytes(head_dim));
    Extent { shared, ..Extent::line(jobs.min(sms), threads) }
}

/// Returns the error for a head dimension that has no kernels. The op layer has already refused
/// such calls.
fn refused(op: &'static str, head_dim: usize, rows: &Tensor<'_>) -> KernelError {
    let expected = format!("a head size with a kernel, not {head_dim}");
    KernelError::Shape { op, what: "heads", expected, found: rows.shape() }
}

fn paged_head_dim(call: &calls::AttentionPaged<'_>) -> Result<HeadDim, KernelError> {
    let head_dim = call.layer.shape.head_dim;
    HeadDim::of(head_dim).ok_or_else(|| refused("attention_paged", head_dim, &call.queries))
}

/// Returns an upper bound on the number of query tiles: each sequence after the first may start a
/// new tile.
fn tiles(tile: usize, vectors: usize, sequences: usize) -> usize {
    (vectors + (tile - 1) * sequences) / tile
}

/// Returns the kernels' `window` argument. `None` and windows longer than `NO_WINDOW` become
/// `NO_WINDOW`.
fn window(call: &calls::AttentionPaged<'_>) -> u32 {
    let window = call.window.and_then(|window| u32::try_from(window).ok());
    window.unwrap_or(contract::common::NO_WINDOW).min(contract::common::NO_WINDOW)
}

pub(super) fn paged(cuda: &Cuda, call: calls::AttentionPaged<'_>) -> Result<(), KernelError> {
    let singles = call.sequences.single_rows;
    if singles > 0 {
        decode(cuda, &call, singles)?;
    }
    prefill(cuda, &call, singles)
}

/// Decodes the first `sequences` sequences, which have one row each.
fn decode(cuda: &Cuda, call: &calls::AttentionPaged<'_>, sequences: usize) -> Result<(), KernelError> {
    let (shape, group) = (call.layer.shape, call.heads / call.layer.shape.kv_heads);
    let (sms, shared_most) = (cuda.kernels.target.sms, cuda.kernels.functions.shared_most());
    let head_dim = paged_head_dim(call)?;
    let ring = attention_decode::ring_bytes(head_dim);
    let launch = DecodeLaunch::of(sequences, call.heads, shape.kv_heads, sms).within(shared_most, ring, sms);
    let partials = launch.part_numbers(head_dim) * DType::F32.size();
    assert!(partials <= call.scratch.bytes().as_usize(), "decoding needs more scratch than the target declares");
    assert!(launch.workers <= attention_decode::COUNTERS, "no device has this many multiprocessors");
    // If all sequences have a single row and no two rows belong to the same text, earlier steps
    // have written the cached tokens before these rows. The kernel may therefore read those tokens
    // before the preceding kernel has ended.
    let past_is_there = sequences == call.sequences.context_lengths.rows() && !call.sequences.has_linked_rows;
    // In a step of few rows, this project's GEMMs read their weights with the L2 evict-first hint.
    // The kernel should then read keys and values with the same hint if they exceed `READ_ONCE_MIB`
    // of `decode_attention.cuh`.
    let others_read_once =
        call.queries.rows() <= contract::gemm_small_m::ROWS_MAX && cuda.kernels.functions.is_machine_code();
    let flags = u32::from(past_is_there) * attention_decode::PAST_IS_THERE
        + u32::from(others_read_once) * attention_decode::OTHERS_READ_ONCE;
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
        address_or_null(&call.scales),
        call.scale,
        window(call),
        launch.piece,
        flags,
        call.scratch.address(),
        cuda.kernels.decode_counters,
        call.out.address(),
    ];
    let extent = Extent { grid: [launch.workers, 1, 1], block: [32 * launch.warps, 1], shared: launch.warps * ring };
    let kernels = match quantized_cache(cuda, "attention_paged", call.layer)? {
        Some(quantized) => &quantized.attention_decode,
        None => &cuda.entry_points().attention_decode,
    };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernels[head_dim], extent, arguments) }
}

/// Computes attention for the sequences from `first_sequence` on.
fn prefill(cuda: &Cuda, call: &calls::AttentionPaged<'_>, first_sequence: usize) -> Result<(), KernelError> {
    let (shape, sms) = (call.layer.shape, cuda.kernels.target.sms);
    let sequences = call.sequences.context_lengths.rows();
    // Each sequence before `first_sequence` has one row.
    let (rows, left) = (call.queries.rows() - first_sequence, sequences - first_sequence);
    if rows == 0 || left == 0 {
        return Ok(());
    }
    let vectors = rows * (call.heads / shape.kv_heads);
    let hopper = paged_hopper(cuda, call)?;
    let jobs = shape.kv_heads * tiles(attention_paged_hopper::QUERIES, vectors, left);
    let keys = (call.sequences.query_key_pairs / call.queries.rows() as u64).min(u64::from(window(call))) as usize;
    let splits = (sms / jobs).min(keys / attention_paged_hopper::SPLIT_KEYS);
    let split = hopper.filter(|_| splits > 1);
    let (arguments, kernel, extent) = if let Some((head_dim, kernels)) = hopper {
        let arguments = arguments![cache_map(call)?, call.out.address(), call.queries.address()];
        let (kernel, jobs) = if splits > 1 { (kernels.split, jobs * splits) } else { (kernels.whole, jobs) };
        (arguments, kernel, paged_extent(head_dim, shape.dtype.needs_scales(), jobs, sms))
    } else {
        let arguments = arguments![call.out.address(), call.queries.address(), call.layer.address];
        let head_dim = paged_head_dim(call)?;
        let (queries, threads) = match head_dim {
            HeadDim::D512 => (attention_prefill::WIDE_TILE_QUERIES, attention_prefill::WIDE_THREADS),
            _ => (attention_prefill::TILE_QUERIES, attention_prefill::THREADS),
        };
        let blocks = shape.kv_heads * tiles(queries, vectors, left);
        let quantized = quantized_cache(cuda, "attention_paged", call.layer)?;
        let kernels = quantized.map_or(&cuda.entry_points().attention_paged, |quantized| &quantized.attention_paged);
        (arguments, kernels[head_dim], Extent::line(blocks, threads))
    };
    let mut arguments = arguments
        .with(call.sequences.query_starts.address())
        .with(call.sequences.context_lengths.address())
        .with(call.sequences.block_tables.address());
    if let Some((head_dim, _)) = split {
        let parts = jobs * splits * attention_paged_hopper::part_numbers(head_dim) * DType::F32.size();
        assert!(parts <= call.scratch.bytes().as_usize(), "split tiles need more scratch than the target declares");
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
        .with(count(call.sequences.block_tables.columns()))
        .with(window(call));
    if split.is_some() {
        arguments = arguments.with(count(splits));
    }
    arguments = arguments.with(address_or_null(&call.key_ends));
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments.with(address_or_null(&call.scales)).with(call.scale)) }?;
    match split {
        Some((_, kernels)) => combine(cuda, kernels.combine, call, first_sequence, jobs, splits),
        None => Ok(()),
    }
}

/// Merges the partial results of split tiles.
fn combine(
    cuda: &Cuda,
    kernel: Function,
    call: &calls::AttentionPaged<'_>,
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
        window(call),
        count(splits),
        address_or_null(&call.key_ends),
        address_or_null(&call.scales),
        call.scale,
    ];
    let warps = attention_paged_hopper::COMBINE_WARPS;
    let extent = Extent::line(jobs * (attention_paged_hopper::QUERIES / warps), 32 * warps);
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

/// Returns the tensor map of the KV cache. One piece contains the keys or the values of sixteen
/// tokens of one head.
fn cache_map(call: &calls::AttentionPaged<'_>) -> Result<TensorMap, KernelError> {
    let shape = call.layer.shape;
    let (pieces, columns) = ((call.layer.blocks * 2 * shape.kv_heads) as u64, shape.head_dim as u64);
    let layout = if shape.dtype.needs_scales() {
        // Dimensions: columns of a head, tokens, pieces.
        Layout {
            dimensions: &[columns, BLOCK_TOKENS as u64, pieces],
            strides: &[columns, 16 * columns],
            cube: &[columns as u32, count(BLOCK_TOKENS), 1],
            swizzle: Swizzle::None,
        }
    } else {
        // Dimensions: 64 columns of a head, eight tokens, the next 64 columns, the next eight
        // tokens, pieces.
        Layout {
            dimensions: &[64, 8, columns / 64, BLOCK_TOKENS as u64 / 8, pieces],
            strides: &[2 * columns, 128, 16 * columns, 32 * columns],
            cube: &[64, 8, columns as u32 / 64, 2, 1],
            swizzle: Swizzle::Bytes128,
        }
    };
    Ok(TensorMap::new(call.layer.address, shape.dtype, &layout)?)
}

pub(super) fn packed(cuda: &Cuda, call: calls::AttentionPacked<'_>) -> Result<(), KernelError> {
    let (rows, sequences) = (call.qkv.rows(), call.starts.rows() - 1);
    if rows == 0 {
        return Ok(());
    }
    let refused = || refused("attention_packed", call.head_dim, &call.qkv);
    let head_dim = PackedHeadDim::of(call.head_dim).ok_or_else(refused)?;
    let kernels = cuda.entry_points();
    let places = |arguments: Arguments| {
        let arguments = arguments.with(call.starts.address()).with(count(call.out.pitch()));
        let arguments = arguments.with(count(call.qkv.pitch())).with(count(rows)).with(count(sequences));
        arguments.with(count(call.heads)).with(call.scale)
    };
    let plain = || arguments![call.out.address(), call.qkv.address()];
    let windows = kernels.attention_windows[head_dim].filter(|_| call.longest <= attention_prefill::WINDOW_ROWS);
    let (arguments, kernel, extent) = if let Some(kernel) = windows {
        (plain(), kernel, Extent::line(call.heads * sequences, attention_prefill::THREADS))
    } else if let Some(hopper) = &kernels.hopper {
        let map = packed_map(&call.qkv, call.heads, head_dim)?;
        let arguments = arguments![map, call.out.address(), call.qkv.address()];
        let jobs = call.heads * tiles(attention_hopper::packed_queries(head_dim), rows, sequences);
        let extent = packed_extent(head_dim, jobs, cuda.kernels.target.sms);
        (arguments, hopper.attention_packed[head_dim], extent)
    } else {
        let blocks = call.heads * tiles(attention_prefill::TILE_QUERIES, rows, sequences);
        (plain(), kernels.attention_packed[head_dim], Extent::line(blocks, attention_prefill::THREADS))
    };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, places(arguments)) }
}

/// Returns the tensor map of packed rows. One copy transfers one chunk of columns of one head, for
/// all keys of one step of the kernel's loop. Columns past a head's last column are read as zeros,
/// not as the next head's columns.
fn packed_map(qkv: &Tensor<'_>, heads: usize, head_dim: PackedHeadDim) -> Result<TensorMap, KernelError> {
    let (columns, chunk) = (head_dim.elements() as u64, attention_hopper::packed_chunk(head_dim));
    let layout = Layout {
        // Dimensions: columns of a head, rows, heads of queries, keys and values.
        dimensions: &[columns, qkv.rows() as u64, 3 * heads as u64],
        strides: &[2 * qkv.pitch() as u64, 2 * columns],
        cube: &[count(chunk), count(attention_hopper::packed_keys(head_dim)), 1],
        swizzle: if chunk == 64 { Swizzle::Bytes128 } else { Swizzle::Bytes32 },
    };
    Ok(TensorMap::new(qkv.address(), qkv.dtype(), &layout)?)
}
