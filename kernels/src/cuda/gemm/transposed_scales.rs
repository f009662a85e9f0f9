//! Conversion of scales by blocks to the layouts that cuBLASLt reads
//! (`kernels/cuda/transpose_scales.cu`).

use bursar_budgets::Address;

use super::{
    super::{
        arguments::{Extent, arguments, count},
        contract::transpose_scales::{PADDED, THREADS, TILE},
        lane::Cuda,
    },
    problem::{GemmOperands, GemmProblem},
    scale_scratch::{self, Scratch},
};
use crate::KernelError;

/// Converts the scales of a GEMM with scales by blocks, and returns its operands in the form that
/// the library needs. The operands of any other GEMM are returned unchanged.
///
/// # Safety
/// `operands` must match `problem`, and nothing else may use the workspace until the GEMM has
/// ended.
///
/// # Panics
/// If the scales of a GEMM with scales by blocks do not [fit](scale_scratch::fit).
pub(super) unsafe fn transpose(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
) -> Result<GemmOperands, KernelError> {
    if problem.block_rows().is_none() {
        return Ok(operands);
    }
    let scratch = Scratch::within(problem, operands).expect("the library was chosen for the GEMM");
    let (groups, blocks) = (scale_scratch::groups(problem), scale_scratch::blocks(problem));
    let padded_groups = groups.next_multiple_of(PADDED);
    let more = scratch.padded.map_or(0, |_| (blocks * padded_groups).div_ceil(THREADS));
    let extent = Extent::line(problem.rows.div_ceil(TILE) * groups.div_ceil(TILE) + more, THREADS);
    let arguments = arguments![
        Address(operands.x_scales),
        Address(scratch.transposed),
        count(problem.rows),
        count(groups),
        Address(operands.weight_scales),
        Address(scratch.padded.unwrap_or(0)),
        count(blocks),
        count(padded_groups),
    ];
    let kernel = cuda.entry_points().hopper.as_ref().expect("the library was chosen for the GEMM").transpose_scales;
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that their
    // addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments)? };
    Ok(scale_scratch::for_library(problem, operands))
}
