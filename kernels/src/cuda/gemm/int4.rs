//! GEMMs with weights of 4-bit integers, in launches of up to 64 rows that stream the weight
//! (`kernels/cuda/gemm_int4.cu`), and launch arguments for such weights.

use bursar_budgets::Address;

use super::{
    super::{
        arguments::{Arguments, Extent, arguments, count},
        contract::{
            SmallMRows,
            gemm_int4::{ADD_TO_OUT, GATED, OUT_IS_F32, ROWS_MAX, THREADS, shared_bytes},
        },
        lane::Cuda,
    },
    problem::{GemmOperands, GemmProblem},
    tiles::Int4Tiles,
};
use crate::KernelError;

/// Launches the kernel, with up to 64 rows per launch.
///
/// # Safety
/// `operands` must match `problem`, and the kernel must support the GEMM
/// ([`Kernel::Int4`](super::table::Kernel)). No kernel that may still run at the launch may write
/// the weight or its scales, because the first copies of both do not wait for the preceding kernel.
/// Nothing may write the weight or its scales until this kernel has ended.
pub(super) unsafe fn launch(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands) -> Result<(), KernelError> {
    for first in (0..problem.rows).step_by(ROWS_MAX) {
        let rows = ROWS_MAX.min(problem.rows - first);
        let (piece, operands) = problem.rows_of(operands, cuda.kernels.target.activation, first, rows);
        // SAFETY: the caller guarantees that the operands match the whole GEMM, so their parts for
        // these rows match `piece`, and that nothing writes the weight or its scales.
        unsafe { launch_rows(cuda, piece, operands)? };
    }
    Ok(())
}

/// Launches the kernel once.
///
/// # Safety
/// The requirements are the same as for [`launch`]. There are at most `ROWS_MAX` rows.
unsafe fn launch_rows(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands) -> Result<(), KernelError> {
    let kernels = cuda.entry_points().int4.as_ref().expect("the kernel supports the GEMM");
    let counters = cuda.gemm.counters.as_ref().expect("the kernel supports the GEMM");
    let kernel_rows = SmallMRows::holding(&SmallMRows::UP_TO_64, problem.rows).expect("a launch has at most 64 rows");
    let tiles = Int4Tiles::of(problem, kernel_rows, cuda.kernels.target.sms);
    let is = |holds: bool, flag: u32| u32::from(holds) * flag;
    let flags = is(problem.accumulates, ADD_TO_OUT) | is(problem.out_is_f32, OUT_IS_F32) | is(problem.gates, GATED);
    let arguments = arguments![
        Address(operands.weight),
        Address(operands.weight_scales),
        Address(operands.weight_zero_points),
        Address(operands.x),
        Address(operands.bias.unwrap_or(0)),
        Address(operands.out),
        Address(operands.workspace),
        counters.address,
        count(problem.rows),
        count(problem.features()),
        count(problem.in_features),
        count(problem.x_pitch),
        count(problem.out_pitch),
        group_bits(problem),
        count(tiles.units),
        flags,
    ];
    let extent = Extent { grid: [tiles.blocks, 1, 1], block: [THREADS, 1], shared: shared_bytes(kernel_rows) };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that their
    // addresses are valid.
    unsafe { cuda.launch(kernels.streamed[kernel_rows], extent, arguments) }
}

/// Appends the arguments for the scales of a weight of 4-bit integers to those of the small-m
/// kernel.
pub(super) fn with_int4_scales(arguments: Arguments, problem: GemmProblem, operands: GemmOperands) -> Arguments {
    arguments
        .with(Address(operands.weight_scales))
        .with(Address(operands.weight_zero_points))
        .with(count(problem.in_features))
        .with(group_bits(problem))
}

/// Returns the logarithm to base 2 of the columns of a group.
pub(super) fn group_bits(problem: GemmProblem) -> u32 {
    let scheme = problem.scheme.expect("a GEMM with a weight of 4-bit integers has a scheme");
    scheme.weights.group_columns(problem.in_features).ilog2()
}
