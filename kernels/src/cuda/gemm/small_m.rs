//! GEMMs of up to 64 rows, or 128 rows with 4-bit integers, by this project's kernels for Hopper
//! (`kernels/cuda/gemm_small_m*.cu`), which stream the weight once.

use bursar_budgets::{Address, DeviceError};

use super::{
    super::{
        arguments::{Extent, arguments, count},
        contract::{
            Int4, SmallMRows,
            gemm_small_m::{
                ADD_TO_OUT, CHUNK_COLUMNS, GATE_ROWS, IS_GELU, OUT_IS_F32, STEP_COLUMNS, THREADS, shared_bytes,
            },
        },
        lane::Cuda,
        tensor_map::{Layout, Rows, Swizzle, TensorMap},
    },
    int4::with_int4_scales,
    problem::{GemmOperands, GemmProblem},
    scale_arguments::with_scales,
    table::Kernel,
    tiles::{Cut, SmallMTiles},
};
use crate::{DType, KernelError, SCALE_BLOCK, calls::GateActivation, int4::BLOCK_ROWS};

/// Launches the kernel.
///
/// # Safety
/// `operands` must match `problem`, and the kernel must support the GEMM ([`Kernel::SmallM`]). No
/// kernel that may still run at the launch may write the weight or its scales, because the first
/// copies of both do not wait for the preceding kernel. Nothing may write the weight or its scales
/// until this kernel has ended.
pub(super) unsafe fn launch(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    cut: Cut,
) -> Result<(), KernelError> {
    let tiles = SmallMTiles::of(problem, cut, cuda.kernels.target.sms);
    let kernel_rows = SmallMRows::holding(problem.small_m_sizes(), problem.rows).expect("the kernel supports the GEMM");
    let entry_points = cuda.entry_points();
    let kernels = entry_points.hopper.as_ref().expect("the kernel supports the GEMM");
    let counters = cuda.gemm.counters.as_ref().expect("the kernel supports the GEMM");
    let activation = cuda.kernels.target.activation;
    let rows = Rows { pitch: problem.tma_x_pitch(), ..problem.x() };
    let chunk = if problem.quantizes_x() { SCALE_BLOCK } else { CHUNK_COLUMNS };
    let x = TensorMap::of_rows(operands.x, problem.x_type(activation), rows, [kernel_rows.rows(), chunk])?;
    let weight = if problem.is_int4() {
        int4_map(problem, operands, &tiles)?
    } else if problem.gates {
        gated_map(problem, operands, &tiles, activation)?
    } else {
        let elements = problem.weight_type(activation);
        TensorMap::of_rows(operands.weight, elements, problem.weight(), [tiles.tile_rows, chunk])?
    };
    let mut arguments = arguments![weight, x, Address(operands.out)];
    if !problem.gates {
        arguments = arguments.with(Address(operands.bias.unwrap_or(0)));
    }
    arguments = arguments
        .with(Address(operands.workspace))
        .with(counters.address)
        .with(count(problem.out_pitch))
        .with(count(problem.rows))
        .with(count(problem.features()))
        .with(count(tiles.steps))
        .with(count(tiles.tiles))
        .with(count(tiles.tile_rows));
    // The gated kernel for 4-bit integers takes no flags, because it supports only SiLU.
    if !(problem.gates && problem.is_int4()) {
        let is = |holds: bool, flag: u32| u32::from(holds) * flag;
        let is_gelu = operands.activation == GateActivation::GeluTanh;
        let of_output = is(problem.accumulates, ADD_TO_OUT) | is(problem.out_is_f32, OUT_IS_F32);
        arguments = arguments.with(of_output | is(is_gelu, IS_GELU));
    }
    if problem.is_int4() {
        arguments = with_int4_scales(arguments, problem, operands);
    } else if !problem.is_unquantized() {
        arguments = with_scales(arguments, problem, operands);
    }
    let kernel = match (problem.scheme, &entry_points.int4) {
        (Some(scheme), int4) if scheme.is_int4() => {
            let Some(Int4 { small_m: Some(kernels), .. }) = int4 else {
                return Err(KernelError::NoKernel { op: "linear" });
            };
            if problem.gates { kernels.gated[kernel_rows] } else { kernels.plain[kernel_rows] }
        }
        (Some(scheme), _) => kernels.gemm_small_m_quantized.of(scheme)[kernel_rows],
        (None, _) if problem.gates => kernels.gemm_small_m_gated[kernel_rows],
        (None, _) => kernels.gemm_small_m[kernel_rows],
    };
    let extent = Extent { grid: [tiles.blocks, 1, 1], block: [THREADS, 1], shared: shared_bytes(kernel_rows) };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that their
    // addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

/// Computes a GEMM with any number of rows, in launches of as many rows as the kernel supports.
///
/// # Errors
/// The kernel does not support the GEMM, or the device reports an error.
///
/// # Safety
/// The requirements are the same as for [`launch`], except that the kernel need not support the
/// GEMM.
pub(super) unsafe fn launch_pieces(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    cut: Cut,
) -> Result<(), KernelError> {
    let rows_max = problem.small_m_rows_max();
    for first in (0..problem.rows).step_by(rows_max) {
        let rows = rows_max.min(problem.rows - first);
        let (piece, operands) = problem.rows_of(operands, cuda.kernels.target.activation, first, rows);
        if !cuda.gemm.gpu.supports(Kernel::SmallM, piece, operands) {
            return Err(KernelError::NoKernel { op: "linear" });
        }
        // SAFETY: the caller guarantees that the operands match the whole GEMM, so the operands of
        // these rows match these rows. The check above ensures that the kernel supports them.
        unsafe { launch(cuda, piece, operands, cut)? };
    }
    Ok(())
}

/// Returns the tensor map of a gated weight: groups of eight gate rows alternate with the
/// corresponding eight up rows.
fn gated_map(
    problem: GemmProblem,
    operands: GemmOperands,
    tiles: &SmallMTiles,
    activation: DType,
) -> Result<TensorMap, DeviceError> {
    let (columns, rows, gates) = (problem.in_features as u64, problem.out_features as u64, GATE_ROWS as u64);
    let pitch = 2 * columns;
    let layout = Layout {
        dimensions: &[columns, gates, 2, rows / 2 / gates],
        strides: &[pitch, pitch * (rows / 2), pitch * gates],
        cube: &[count(CHUNK_COLUMNS), count(GATE_ROWS), 2, count(tiles.tile_rows / (2 * GATE_ROWS))],
        swizzle: Swizzle::Bytes128,
    };
    TensorMap::new(Address(operands.weight), activation, &layout)
}

/// Returns the tensor map of a weight of 4-bit integers. The map's dimensions are the 32-bit words
/// of a block and the blocks. For a gated GEMM, it has a third dimension: the gate half and the up
/// half. One copy transfers one step of one tile.
fn int4_map(problem: GemmProblem, operands: GemmOperands, tiles: &SmallMTiles) -> Result<TensorMap, DeviceError> {
    // A block of eight rows has a word for each column.
    let (words, blocks) = (problem.in_features as u64, (problem.features() / BLOCK_ROWS) as u64);
    let (pitch, copied) = (DType::U32.bytes(problem.in_features).0, count(STEP_COLUMNS));
    let tile_blocks = count(tiles.tile_rows / BLOCK_ROWS / problem.rows_per_feature());
    let rank = if problem.gates { 3 } else { 2 };
    let layout = Layout {
        dimensions: &[words, blocks, 2][..rank],
        strides: &[pitch, pitch * blocks][..rank - 1],
        cube: &[copied, tile_blocks, 2][..rank],
        swizzle: Swizzle::None,
    };
    TensorMap::new(Address(operands.weight), DType::U32, &layout)
}
