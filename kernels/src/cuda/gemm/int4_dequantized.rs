//! GEMMs of many rows with weights of 4-bit integers, by unquantized GEMMs of dequantized slices.

use bursar_budgets::Address;

use super::{
    super::{
        arguments::{Extent, arguments, count},
        contract::gemm_int4::THREADS,
        lane::Cuda,
    },
    compare::compare_large_m,
    int4::group_bits,
    int4_slices::{Slice, slices},
    large_m::{self, Output},
    launch::launch,
    planning,
    problem::{GemmOperands, GemmProblem},
    table::Kernel,
};
use crate::{KernelError, int4::BLOCK_ROWS};

/// Computes a GEMM by unquantized GEMMs of dequantized slices of the weight. `unfused` computes a
/// gated GEMM as an ungated GEMM followed by the gate.
///
/// # Safety
/// `operands` must match `problem`, and the table must list
/// [`Kernel::DequantizedInt4`] for the GEMM. Nothing else may use the workspace
/// until the GEMM has ended.
pub(super) unsafe fn compute(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    unfused: &dyn Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let activation = cuda.kernels.target.activation;
    let gemm_of = |slice: Slice| slice.of(problem, operands, activation);
    let is_fused = |slice: Slice| {
        let (problem, operands) = gemm_of(slice);
        cuda.gemm.gpu.supports(Kernel::LargeM, problem, operands)
    };
    // A slice has one bias address, but the biases of its gate rows and of its up rows are not
    // adjacent.
    if problem.gates && (problem.has_bias || !slices(problem).all(is_fused)) {
        return unfused();
    }
    for slice in slices(problem) {
        let (of_slice, slice_operands) = gemm_of(slice);
        // SAFETY: the workspace has space for the slice, and the kernels of the stream that may
        // write this part of the workspace have ended when the dequantization starts.
        unsafe { dequantize(cuda, problem, operands, slice, slice_operands.weight)? };
        if problem.gates {
            // SAFETY: the operands match the slice, and the table says that the kernel supports the
            // GEMM.
            unsafe { large_m::launch(cuda, of_slice, slice_operands, Output::PLAIN)? };
        } else {
            compute_unquantized(cuda, of_slice, slice_operands)?;
        }
    }
    Ok(())
}

/// Writes the elements of a slice of the weight to `out`.
///
/// # Safety
/// `operands` must match `problem`, and `out` must be the address of memory for the slice.
unsafe fn dequantize(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    slice: Slice,
    out: u64,
) -> Result<(), KernelError> {
    let kernels = cuda.entry_points().int4.as_ref().expect("the kernel supports the GEMM");
    let rows = slice.features * problem.rows_per_feature();
    let arguments = arguments![
        Address(operands.weight),
        Address(operands.weight_scales),
        Address(operands.weight_zero_points),
        Address(out),
        count(problem.in_features),
        group_bits(problem),
        count(slice.features),
        count(slice.first),
        count(slice.first + problem.features()),
    ];
    let extent = Extent { grid: [rows.div_ceil(BLOCK_ROWS), 1, 1], block: [THREADS, 1], shared: 0 };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that their
    // addresses are valid.
    unsafe { cuda.launch(kernels.dequantize, extent, arguments) }
}

/// Plans and launches an ungated GEMM with a slice of a dequantized weight. The slice is not
/// recorded for autotuning, because GEMMs of few rows have no slices.
///
/// # Errors
/// The device reports an error.
fn compute_unquantized(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands) -> Result<(), KernelError> {
    let no_kernel = || Err(KernelError::NoKernel { op: "linear" });
    if cuda.gemm.autotunes.get() {
        compare_large_m(cuda, problem, operands, Output::PLAIN, &no_kernel)?;
    }
    let Some(plan) = planning::plan(cuda, problem, operands)? else { return no_kernel() };
    // SAFETY: the op layer has checked the shapes, the creators of the tensors guarantee that their
    // memory is valid, nothing else uses the workspace until this GEMM has ended, the planned
    // kernel supports the GEMM, and the slice was written by a kernel of the same stream. A kernel
    // that reads weights before the preceding kernel has ended is not planned, because the table
    // lists the large-m kernel or the library for every slice.
    unsafe { launch(cuda, plan, problem, operands, Output::PLAIN) }
}
