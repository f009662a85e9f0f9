//! Launches of layers with a recurrent state: the causal convolution, the gated delta rule, and the
//! gates around them.

use bursar_budgets::{Address, Bytes};

use super::{
    arguments::{Argument, Arguments, Extent, arguments, count},
    contract::{causal_conv as conv, gated_delta as delta, gated_rms_norm as gated_norm},
    elementwise::over_columns,
    lane::Cuda,
};
use crate::{KernelError, StateLayer, calls};

/// Number of activations in 16 bytes, which the kernel for chunks reads at once.
const ROW_STEP: usize = 8;

/// The sequences of a step, in the layout of the kernels' parameter (`state_sequences.cuh`).
#[repr(C)]
#[derive(Clone, Copy)]
struct StateSequences {
    query_starts: Address,
    context_lengths: Address,
    reads: Address,
    writes: Address,
    snapshot_rows: Address,
    snapshot_slots: Address,
    sequences: u32,
    rows: u32,
}

impl Argument for StateSequences {}

impl StateSequences {
    fn of(sequences: &calls::StateSequences<'_>, rows: usize) -> Self {
        StateSequences {
            query_starts: sequences.query_starts.address(),
            context_lengths: sequences.context_lengths.address(),
            reads: sequences.reads.address(),
            writes: sequences.writes.address(),
            snapshot_rows: sequences.snapshot_rows.address(),
            snapshot_slots: sequences.snapshot_slots.address(),
            sequences: count(sequences.context_lengths.rows()),
            rows: count(rows),
        }
    }
}

/// The slots of one layer, in the layout of the kernels' parameter (`state_sequences.cuh`).
#[repr(C)]
#[derive(Clone, Copy)]
struct StateSlots {
    start: Address,
    slot_bytes: u64,
    /// Bytes from the start of a slot to its matrices.
    matrices_at: u64,
    slots: u32,
    padding: u32,
}

impl Argument for StateSlots {}

impl StateSlots {
    fn of(layer: &StateLayer) -> Self {
        let shape = layer.shape();
        StateSlots {
            start: layer.address(),
            slot_bytes: shape.slot_bytes().0,
            matrices_at: shape.conv_bytes().0,
            slots: count(layer.slots()),
            padding: 0,
        }
    }
}

pub(super) fn causal_conv(cuda: &Cuda, call: calls::CausalConv<'_>) -> Result<(), KernelError> {
    const OP: &str = "causal_conv";
    let (channels, taps, rows) = (call.out.columns(), call.weight.columns(), call.out.rows());
    if !(conv::TAPS_MIN..=conv::TAPS_MAX).contains(&taps) {
        return Err(KernelError::NoKernel { op: OP });
    }
    let (sequences, singles) = (call.sequences.context_lengths.rows(), call.sequences.single_rows);
    let left = sequences - singles;
    // Each sequence may have one tile that is not full.
    let tiles = if left == 0 { 0 } else { (rows - singles + (conv::TILE_ROWS - 1) * left) / conv::TILE_ROWS };
    let wide = channels.div_ceil(conv::CHANNELS * conv::THREADS);
    let extent = Extent { grid: [wide, singles + tiles, 1], block: [conv::THREADS, 1], shared: 0 };
    let arguments = arguments![
        call.x.address(),
        count(call.x.pitch()),
        call.weight.address(),
        count(channels),
        count(taps),
        StateSequences::of(call.sequences, rows),
        StateSlots::of(call.layer),
        count(singles),
        call.out.address(),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().states.causal_conv, extent, arguments) }
}

pub(super) fn gated_delta(cuda: &Cuda, call: calls::GatedDelta<'_>) -> Result<(), KernelError> {
    let shape = call.layer.shape();
    if !shape.key_dim.is_multiple_of(delta::KEY_DIM_STEP) || shape.key_dim > delta::KEY_DIM_MAX {
        return Err(KernelError::NoKernel { op: "gated_delta" });
    }
    let calls::StateSequences { single_rows: singles, short_sequences: short, .. } = *call.sequences;
    let sequences = call.sequences.context_lengths.rows();
    token_by_token(cuda, &call, 0, singles)?;
    if has_chunks(&call) {
        token_by_token(cuda, &call, singles, short - singles)?;
        return in_chunks(cuda, &call, short, sequences - short);
    }
    token_by_token(cuda, &call, singles, sequences - singles)
}

/// Returns `true` if the kernels on the tensor cores support the operands. The target declares
/// scratch only for shapes that these kernels support.
fn has_chunks(call: &calls::GatedDelta<'_>) -> bool {
    call.scratch.bytes() > Bytes::ZERO
        && call.qkv.pitch().is_multiple_of(ROW_STEP)
        && call.qkv.address().0.is_multiple_of(16)
        && call.out.address().0.is_multiple_of(4)
}

/// Computes `sequences` sequences, starting with sequence `first`, in chunks of tokens on the
/// tensor cores.
fn in_chunks(cuda: &Cuda, call: &calls::GatedDelta<'_>, first: usize, sequences: usize) -> Result<(), KernelError> {
    let (shape, kernels) = (call.layer.shape(), &cuda.entry_points().states);
    let rows = call.out.rows();
    assert!(
        cuda.kernels.target.delta_scratch(shape, rows) <= call.scratch.bytes(),
        "chunks need more scratch than the target declares"
    );
    let arguments = || delta_arguments(call, first).with(call.scratch.address());
    // Each sequence may have one chunk that is not full.
    let tiles = (rows.saturating_sub(first) + (delta::CHUNK - 1) * sequences) / delta::CHUNK;
    let block = [delta::CHUNK_THREADS, 1];
    let prepare = Extent { grid: [shape.value_heads, tiles, 1], block, shared: delta::PREPARE_SHARED_BYTES };
    // SAFETY: the arguments match the kernel's parameters, the op layer has checked the shapes, and
    // the scratch is large enough.
    unsafe { cuda.launch(kernels.gated_delta_prepare, prepare, arguments())? };
    let blocks = shape.value_heads * (shape.value_dim / delta::CHUNK_VALUES);
    let chunked = Extent { grid: [blocks, sequences, 1], block, shared: delta::CHUNK_SHARED_BYTES };
    // SAFETY: the arguments match the kernel's parameters, the op layer has checked the shapes, and
    // the scratch is large enough.
    unsafe { cuda.launch(kernels.delta(shape.state_dtype).chunked, chunked, arguments()) }
}

/// Computes `sequences` sequences, starting with sequence `first`, token by token.
fn token_by_token(
    cuda: &Cuda,
    call: &calls::GatedDelta<'_>,
    first: usize,
    sequences: usize,
) -> Result<(), KernelError> {
    let shape = call.layer.shape();
    let kernels = cuda.entry_points().states.delta(shape.state_dtype);
    let blocks = |held: usize| shape.value_heads * shape.value_dim.div_ceil(delta::GROUPS * held);
    let are_single = first + sequences <= call.sequences.single_rows;
    // With several rows per lane group, a launch has fewer thread blocks. If it had fewer thread
    // blocks than SMs, some SMs would have no work.
    let is_held = are_single && sequences * blocks(delta::HELD) >= cuda.kernels.target.sms;
    let (kernel, held) = match shape.key_dim {
        delta::KEY_DIM if is_held => (kernels.by_token_128_held, delta::HELD),
        delta::KEY_DIM => (kernels.by_token_128, 1),
        _ => (kernels.by_token, 1),
    };
    let extent = Extent { grid: [blocks(held), sequences, 1], block: [delta::ROW_THREADS, 1], shared: 0 };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, delta_arguments(call, first)) }
}

/// Returns the arguments that all kernels of the gated delta rule take.
fn delta_arguments(call: &calls::GatedDelta<'_>, first_sequence: usize) -> Arguments {
    let shape = call.layer.shape();
    arguments![
        call.qkv.address(),
        count(call.qkv.pitch()),
        call.update.address(),
        count(call.update.pitch()),
        call.decay.address(),
        count(call.decay.pitch()),
        call.log_decay.address(),
        call.bias.address(),
        count(shape.key_heads),
        count(shape.value_heads),
        count(shape.key_dim),
        count(shape.value_dim),
        StateSequences::of(call.sequences, call.out.rows()),
        StateSlots::of(call.layer),
        count(first_sequence),
        call.out.address(),
    ]
}

pub(super) fn gated_rms_norm(cuda: &Cuda, call: calls::GatedRmsNorm<'_>) -> Result<(), KernelError> {
    let (rows, head_dim) = (call.x.rows(), call.weight.rows());
    let heads = call.x.columns() / head_dim;
    let lanes = head_dim.div_ceil(gated_norm::VECTOR).next_power_of_two().min(32);
    let extent = Extent::line((rows * heads * lanes).div_ceil(gated_norm::THREADS), gated_norm::THREADS);
    let arguments = arguments![
        call.x.address(),
        count(call.x.pitch()),
        call.gate.address(),
        count(call.gate.pitch()),
        call.weight.address(),
        count(rows),
        count(heads),
        count(head_dim),
        call.epsilon,
        count(lanes),
        call.out.address(),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().states.gated_rms_norm, extent, arguments) }
}

pub(super) fn sigmoid_mul(cuda: &Cuda, call: calls::SigmoidMul<'_>) -> Result<(), KernelError> {
    let kernels = &cuda.entry_points().states;
    let is_by_row = call.gate.columns() == 1;
    let kernel = if is_by_row { kernels.sigmoid_mul_rows } else { kernels.sigmoid_mul };
    let extent = over_columns(call.x.rows(), call.x.columns());
    let arguments = arguments![
        call.x.address(),
        count(call.x.pitch()),
        call.gate.address(),
        count(call.gate.pitch()),
        count(call.x.columns()),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments) }
}
