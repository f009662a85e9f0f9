//! Launches of planned GEMMs.

use super::{
    super::lane::Cuda,
    int4,
    large_m::{self, Output},
    medium_m,
    plan::GemmPlan,
    planning::blas_lane,
    problem::{GemmOperands, GemmProblem},
    small_m, tiled,
    tiles::Cut,
    transposed_scales,
};
use crate::KernelError;

/// Launches a GEMM.
///
/// # Safety
/// `operands` and `output` must match `problem`, and the kernels of `plan` must support the GEMM.
/// Nothing else may use the workspace until the GEMM has ended. No kernel that may still run at the
/// launch may write the weight or its scales, because the first copies of both do not wait for the
/// preceding kernel. Nothing may write the weight or its scales until the GEMM has ended.
pub(super) unsafe fn launch(
    cuda: &Cuda,
    plan: GemmPlan,
    problem: GemmProblem,
    operands: GemmOperands,
    output: Output<'_>,
) -> Result<(), KernelError> {
    // SAFETY: these functions have no requirements beyond the requirements of this function, which
    // the caller guarantees.
    unsafe {
        match plan {
            GemmPlan::SmallM(cut) => small_m::launch(cuda, problem, operands, cut),
            GemmPlan::SmallMPieces(cut) => small_m::launch_pieces(cuda, problem, operands, cut),
            GemmPlan::MediumM => medium_m::launch(cuda, problem, operands),
            GemmPlan::LargeM => large_m::launch(cuda, problem, operands, output),
            GemmPlan::Tiled => tiled::launch(cuda, problem, operands),
            GemmPlan::Int4 => int4::launch(cuda, problem, operands),
            GemmPlan::DequantizedInt4 => unreachable!("the GEMM of each slice is planned separately"),
            GemmPlan::Library { rest } => library(cuda, problem, operands, rest),
        }
    }
}

/// Launches a GEMM by cuBLASLt, and its last `rest` rows by the small-m kernel.
///
/// # Safety
/// The requirements are the same as for [`launch`].
unsafe fn library(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands, rest: usize) -> Result<(), KernelError> {
    let whole = GemmProblem { rows: problem.rows - rest, ..problem };
    // SAFETY: the caller guarantees that the operands match, and that nothing else uses the
    // workspace until this GEMM has ended.
    unsafe {
        let asked = transposed_scales::transpose(cuda, whole, operands)?;
        let mut gemms = cuda.gemm.library.borrow_mut();
        gemms.multiply(blas_lane(cuda), (whole, asked), cuda.gemm.autotunes.get())?;
    }
    if rest == 0 {
        return Ok(());
    }
    let (last, operands) = problem.rows_of(operands, cuda.kernels.target.activation, whole.rows, rest);
    // SAFETY: the caller guarantees that the operands match, and this kernel uses the workspace
    // after the library's kernel has ended.
    unsafe { small_m::launch(cuda, last, operands, Cut::DEFAULT) }
}
