//! Pure: the slices of a weight of 4-bit integers that are dequantized one at a time, for GEMMs of
//! many rows, and the address of a slice in the workspace.

use bursar_budgets::Bytes;

use super::{
    super::target::CUDA_LINEAR_SCRATCH,
    problem::{GemmOperands, GemmProblem},
};
use crate::DType;

/// Maximum bytes of a slice after dequantization, unless [`UNIT`] rows are longer. With a larger
/// slice, the GEMM of the slice has more tiles, but the workspace is larger.
const SLICE_BYTES: usize = 80 << 20;

/// The number of weight rows of a slice is a multiple of this number, which is the maximum number
/// of weight rows per tile in a GEMM of many rows. In a gated GEMM, half of these rows are gates.
const UNIT: usize = 256;

/// Returns the number of weight rows that are dequantized at a time. All slices but the last have
/// this many rows.
pub(super) fn slice_rows(out_features: usize, in_features: usize) -> usize {
    let row_bytes = DType::F16.bytes(in_features.max(1)).as_usize();
    let most = (SLICE_BYTES / row_bytes / UNIT * UNIT).max(UNIT);
    let slices = out_features.div_ceil(most).max(1);
    out_features.div_ceil(slices).next_multiple_of(UNIT).min(out_features.next_multiple_of(2))
}

/// Returns the bytes of the largest slice of a weight. All activation types of CUDA have the size
/// of f16.
pub(crate) fn slice_bytes(out_features: usize, in_features: usize) -> Bytes {
    DType::F16.bytes(slice_rows(out_features, in_features) * in_features)
}

/// A part of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// Index of the first feature of the slice, among the features that are written.
    pub first: usize,
    /// Number of features that are written. In a gated GEMM, a slice has this many gate rows and
    /// this many up rows.
    pub features: usize,
}

/// Returns the slices of a weight, in order.
pub(super) fn slices(problem: GemmProblem) -> impl Iterator<Item = Slice> {
    let all = problem.features();
    let at_once = slice_rows(problem.out_features, problem.in_features) / problem.rows_per_feature();
    (0..all).step_by(at_once.max(1)).map(move |first| Slice { first, features: at_once.min(all - first) })
}

impl Slice {
    /// Returns the unquantized GEMM of this slice, and its operands. The weight of this GEMM is at
    /// the end of the workspace. The caller must first dequantize the slice to that address.
    pub(super) fn of(
        self,
        problem: GemmProblem,
        operands: GemmOperands,
        activation: DType,
    ) -> (GemmProblem, GemmOperands) {
        let out = if problem.out_is_f32 { DType::F32 } else { activation };
        let at = |elements: DType| elements.bytes(self.first).0;
        let workspace_bytes = CUDA_LINEAR_SCRATCH.as_usize();
        let out_features = self.features * problem.rows_per_feature();
        let of_slice = GemmOperands {
            weight: operands.workspace + workspace_bytes as u64,
            weight_scales: 0,
            weight_zero_points: 0,
            bias: operands.bias.map(|bias| bias + at(activation)),
            out: operands.out + at(out),
            workspace_bytes,
            ..operands
        };
        (GemmProblem { scheme: None, out_features, ..problem }, of_slice)
    }
}

/// Returns `true` if the workspace has space for the largest slice.
pub(super) fn fits(problem: GemmProblem, operands: GemmOperands) -> bool {
    let needed = CUDA_LINEAR_SCRATCH + slice_bytes(problem.out_features, problem.in_features);
    operands.workspace_bytes >= needed.as_usize()
}

#[cfg(test)]
mod tests {
    use super::{
        super::problem::testing::{gated, int4, operands, problem},
        *,
    };

    #[test]
    fn slices_cover_every_feature_and_fit_their_bytes() {
        let whole = [(4608, 3584), (3584, 18_944), (152_064, 8192), (77, 64), (1, 32), (2, 500_000)];
        for (features, columns) in whole {
            for problem in [problem(300, features, columns), gated(300, features, columns)] {
                let found: Vec<_> = slices(problem).collect();
                let ends = found.iter().scan(0, |end, slice| {
                    assert_eq!(slice.first, *end);
                    *end += slice.features;
                    Some(*end)
                });
                assert_eq!(ends.last(), Some(problem.features()), "{problem:?}");
                let rows = slice_rows(problem.out_features, columns);
                let of_each = found[0].features * problem.rows_per_feature();
                assert!(
                    of_each <= rows && DType::F16.bytes(rows * columns) == slice_bytes(problem.out_features, columns)
                );
                assert!(rows <= UNIT || slice_bytes(problem.out_features, columns) <= Bytes(SLICE_BYTES as u64));
            }
        }
        assert_eq!(slices(problem(300, 4608, 3584)).count(), 1);
        assert_eq!(slices(problem(300, 3584, 18_944)).map(|slice| slice.features).collect::<Vec<_>>(), [1792, 1792]);
    }

    #[test]
    fn a_slice_has_its_features_of_the_output_and_of_the_bias() {
        let whole = int4(300, 128);
        let of = GemmOperands { bias: Some(1 << 16), ..operands(256 << 20) };
        let (slice, of_slice) = Slice { first: 512, features: 256 }.of(whole, of, DType::BF16);
        assert_eq!((slice.scheme, slice.out_features, slice.out_pitch), (None, 256, whole.out_pitch));
        assert_eq!((of_slice.out, of_slice.bias), (of.out + 1024, Some((1 << 16) + 1024)));
        assert_eq!(of_slice.weight, of.workspace + (32 << 20));
        assert!(fits(whole, of) && !fits(whole, operands(32 << 20)));
    }
}
