//! Launch arguments for scales, which are the same for all E4M3 kernels.

use bursar_budgets::Address;

use super::{
    super::arguments::{Arguments, count},
    problem::{GemmOperands, GemmProblem, QuantScheme},
};
use crate::FP8_BLOCK;

/// Appends the arguments for the scales of an E4M3 GEMM.
pub(super) fn with_scales(arguments: Arguments, problem: GemmProblem, operands: GemmOperands) -> Arguments {
    let height = if let QuantScheme::E4m3Blocks { height } = problem.scheme { height } else { 1 };
    arguments
        .with(Address(operands.weight_scales))
        .with(Address(operands.x_scales))
        .with(operands.x_scale)
        .with(count(problem.in_features.div_ceil(FP8_BLOCK)))
        .with(count(height))
}
