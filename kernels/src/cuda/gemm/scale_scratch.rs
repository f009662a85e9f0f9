//! Pure: the addresses of converted scales at the end of a GEMM's workspace.
//!
//! cuBLASLt reads scales by blocks in other layouts than this project's kernels. It requires the
//! scales of x transposed, so that scales of adjacent rows are adjacent. It requires the scales of
//! each row of weight blocks padded to a multiple of four.

use bursar_budgets::Bytes;

use super::{
    super::contract::transpose_scales::PADDED,
    problem::{GemmOperands, GemmProblem},
};
use crate::{DType, QuantizationScheme, SCALE_BLOCK};

/// Alignment of addresses in the workspace, in bytes.
const ALIGNMENT: u64 = 256;

/// Alignment of a weight's scales, in bytes, if cuBLASLt reads them without a copy.
const SCALES_ALIGNMENT: u64 = 16;

/// The library requires a multiple of this number of rows of x, because its copies require that
/// each row of the transposed scales is aligned.
pub(super) const ROWS: usize = 4;

/// Addresses of a GEMM's converted scales in its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scratch {
    pub transposed: u64,
    /// Address of the weight's padded scales, or `None` if cuBLASLt reads the weight's
    /// scales without a copy.
    pub padded: Option<u64>,
    /// Bytes of the workspace that remain for the GEMM.
    workspace_bytes: u64,
}

impl Scratch {
    /// Places the converted scales in the workspace. Returns `None` if the library does not support
    /// such a GEMM, or if the converted scales would need more than half of the workspace.
    pub(super) fn within(problem: GemmProblem, operands: GemmOperands) -> Option<Scratch> {
        let has_layout = problem.scheme == Some(QuantizationScheme::BLOCK)
            && problem.rows.is_multiple_of(ROWS)
            && problem.in_features.is_multiple_of(SCALE_BLOCK)
            && problem.in_features > 0;
        if !has_layout {
            return None;
        }
        let groups = groups(problem);
        let is_padded = !groups.is_multiple_of(PADDED);
        if !is_padded && !operands.weight_scales.is_multiple_of(SCALES_ALIGNMENT) {
            return None;
        }
        let padded_bytes = if is_padded { weight_scales_bytes(problem).0 } else { 0 };
        let end = operands.workspace + operands.workspace_bytes as u64;
        let transposed = end.checked_sub(DType::F32.bytes(problem.rows * groups).0)? / ALIGNMENT * ALIGNMENT;
        let first = transposed.checked_sub(padded_bytes)? / ALIGNMENT * ALIGNMENT;
        let workspace_bytes = first.checked_sub(operands.workspace)?;
        let fits = workspace_bytes >= operands.workspace_bytes as u64 / 2;
        let padded = is_padded.then_some(first);
        fits.then_some(Scratch { transposed, padded, workspace_bytes })
    }
}

/// Returns the number of groups of columns with one scale each.
pub(super) fn groups(problem: GemmProblem) -> usize {
    problem.in_features.div_ceil(SCALE_BLOCK)
}

/// Returns the bytes of a weight's padded scales.
fn weight_scales_bytes(problem: GemmProblem) -> Bytes {
    DType::F32.bytes(blocks(problem) * groups(problem).next_multiple_of(PADDED))
}

/// Returns the number of rows of weight blocks.
pub(super) fn blocks(problem: GemmProblem) -> usize {
    problem.out_features.div_ceil(SCALE_BLOCK)
}

/// Returns `true` if the library supports the GEMM's scales, and they fit in the workspace.
pub(super) fn fit(problem: GemmProblem, operands: GemmOperands) -> bool {
    Scratch::within(problem, operands).is_some()
}

/// Returns the operands of a GEMM in the form that the library needs: the addresses of the scales
/// after `transpose` has converted them, and the rest of the workspace.
///
/// # Panics
/// If the scales of a GEMM with scales by blocks do not [`fit`].
pub(super) fn for_library(problem: GemmProblem, operands: GemmOperands) -> GemmOperands {
    if problem.block_rows().is_none() {
        return operands;
    }
    let scratch = Scratch::within(problem, operands).expect("the library was chosen for the GEMM");
    GemmOperands {
        x_scales: scratch.transposed,
        weight_scales: scratch.padded.unwrap_or(operands.weight_scales),
        workspace_bytes: scratch.workspace_bytes as usize,
        ..operands
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::problem::testing::{operands, problem},
        *,
    };

    fn blocks_of(rows: usize, in_features: usize, height: usize) -> GemmProblem {
        GemmProblem { scheme: Some(QuantizationScheme::BLOCK.in_memory(height)), ..problem(rows, 384, in_features) }
    }

    #[test]
    fn scales_are_at_the_end_of_the_workspace() {
        let scratch = Scratch::within(blocks_of(100, 512, 128), operands(1 << 20)).expect("the scratch fits");
        assert_eq!(scratch.padded, None, "four groups need no padding");
        assert!(scratch.transposed + 100 * 4 * 4 <= 2 << 20 && scratch.transposed.is_multiple_of(256));
        assert_eq!(scratch.transposed, (1 << 20) + scratch.workspace_bytes);
        let scratch = Scratch::within(blocks_of(100, 640, 128), operands(1 << 20)).expect("the scratch fits");
        let padded = scratch.padded.expect("five groups are padded to eight");
        assert!(padded + 3 * 8 * 4 <= scratch.transposed && padded == (1 << 20) + scratch.workspace_bytes);
        assert!(scratch.transposed + 100 * 5 * 4 <= 2 << 20);
    }

    #[test]
    fn unsupported_or_too_large_scales_have_no_scratch() {
        assert!(fit(blocks_of(4, 128, 128), operands(1 << 20)));
        assert!(fit(blocks_of(4, 1536, 128), operands(1 << 20)));
        for other in [blocks_of(5, 128, 128), blocks_of(4, 144, 128), blocks_of(4, 128, 64), blocks_of(4, 0, 128)] {
            assert!(!fit(other, operands(1 << 20)), "{other:?}");
        }
        let plain = GemmProblem { scheme: Some(QuantizationScheme::ROW), ..blocks_of(4, 128, 128) };
        assert!(!fit(plain, operands(1 << 20)));
        assert!(!fit(blocks_of(4096, 4096, 128), operands(1 << 19)), "the scales do not fit half a mebibyte");
        assert!(!fit(blocks_of(4, 128, 128), operands(0)), "the scales do not fit without scratch");
        let odd = GemmOperands { weight_scales: 2052, ..operands(1 << 20) };
        assert!(
            !fit(blocks_of(4, 512, 128), odd) && fit(blocks_of(4, 640, 128), odd),
            "only scales that are copied may start at any address"
        );
    }
}
