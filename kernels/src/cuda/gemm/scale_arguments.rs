//! Launch arguments for the scales of FP8 operands, for the small-m and the large-m kernels.

use bursar_budgets::Address;

use super::{
    super::arguments::{Arguments, count},
    problem::{GemmOperands, GemmProblem},
};
use crate::SCALE_BLOCK;

/// Appends the arguments for the scales of an FP8 GEMM.
pub(super) fn with_scales(arguments: Arguments, problem: GemmProblem, operands: GemmOperands) -> Arguments {
    arguments
        .with(Address(operands.weight_scales))
        .with(Address(operands.x_scales))
        .with(operands.x_scale)
        .with(count(problem.in_features.div_ceil(SCALE_BLOCK)))
        .with(count(problem.block_rows().unwrap_or(1)))
}
