//! GEMMs of FP8 weights on GPU generations other than Hopper (`kernels/cuda/gemm_tiled_e4m3.cu`).

use bursar_budgets::Address;

use super::{
    super::{
        arguments::{Extent, arguments, count},
        contract::{
            TILED_ROWS,
            gemm_tiled_e4m3::{
                ADD_TO_OUT, BY_BLOCKS, IS_BF16, LARGE_M_FEATURES, LARGE_M_ROWS, LARGE_M_SHARED_BYTES, LARGE_M_THREADS,
                OUT_IS_F32, SMALL_M_FEATURES, SMALL_M_THREADS,
            },
        },
        lane::Cuda,
    },
    problem::{GemmOperands, GemmProblem},
};
use crate::{DType, KernelError};

/// Launches the kernel for the GEMM's number of rows.
///
/// # Safety
/// `operands` must match `problem`, which must have at least one row and one feature, and the
/// kernel must support the GEMM ([`Kernel::Tiled`](super::table::Kernel)).
pub(super) unsafe fn launch(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands) -> Result<(), KernelError> {
    let kernels = cuda.entry_points().gemm_tiled.as_ref().expect("the kernel supports the GEMM");
    let (height, by_blocks) = problem.block_rows().map_or((1, 0), |height| (height, BY_BLOCKS));
    let is = |holds: bool, flag: u32| u32::from(holds) * flag;
    let flags = by_blocks
        | is(problem.accumulates, ADD_TO_OUT)
        | is(problem.out_is_f32, OUT_IS_F32)
        | is(cuda.kernels.target.activation == DType::BF16, IS_BF16);
    let arguments = arguments![
        Address(operands.weight),
        Address(operands.x),
        Address(operands.weight_scales),
        Address(operands.x_scales),
        operands.x_scale,
        Address(operands.bias.unwrap_or(0)),
        Address(operands.out),
        count(problem.rows),
        count(problem.out_features),
        count(problem.in_features),
        count(problem.x_pitch),
        count(problem.out_pitch),
        count(height),
        flags,
    ];
    let small_m = TILED_ROWS.iter().position(|most| problem.rows <= *most);
    let (kernel, extent) = match small_m {
        Some(size) => {
            (kernels.small_m[size], Extent::line(problem.out_features.div_ceil(SMALL_M_FEATURES), SMALL_M_THREADS))
        }
        None => {
            let grid = [problem.rows.div_ceil(LARGE_M_ROWS), problem.out_features.div_ceil(LARGE_M_FEATURES), 1];
            (kernels.large_m, Extent { grid, block: [LARGE_M_THREADS, 1], shared: LARGE_M_SHARED_BYTES })
        }
    };
    // SAFETY: the arguments match the kernels' parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments) }
}
