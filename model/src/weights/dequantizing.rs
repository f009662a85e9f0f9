//! Dequantization of packed integers.

use std::ops::Range;

use bursar_kernels::DType;

use super::rounding::narrow;
use crate::checkpoint::PackedMatrix;

/// Columns that are dequantized at a time.
const COLUMNS: usize = 512;

/// Writes a part of a packed weight to `out`, row by row, in the type of its scales.
///
/// An element is the product of a whole number below 2^9 and a scale. The product is exact in f32 if
/// the scale has 16 bits, and it is rounded once to the type of the scale. AutoAWQ
/// (`dequantize_gemm`), AutoGPTQ (`QuantLinear.forward`) and compressed-tensors (`dequantize`)
/// compute the same in torch.
///
/// # Panics
/// If a column's group does not exist. [`WeightMap::refuse_bad_scales`](super::WeightMap::refuse_bad_scales)
/// has already checked this.
pub(super) fn dequantize(matrix: &PackedMatrix<'_>, rows: Range<usize>, columns: Range<usize>, out: &mut [u8]) {
    let kept = DType::from(matrix.scale_type);
    let pitch = columns.len() * kept.size();
    let (mut integers, mut wide) = (vec![0; rows.len() * COLUMNS], [0.0; COLUMNS]);
    for first in columns.clone().step_by(COLUMNS) {
        let now = first..columns.end.min(first + COLUMNS);
        let integers = &mut integers[..rows.len() * now.len()];
        matrix.integers(rows.clone(), now.clone(), integers);
        let of_rows = integers.chunks_exact(now.len()).zip(out.chunks_exact_mut(pitch));
        for (row, (integers, out)) in rows.clone().zip(of_rows) {
            let mut latest = usize::MAX;
            let (mut scale, mut zero_point) = (0.0, 0);
            for ((column, integer), wide) in now.clone().zip(&*integers).zip(&mut wide) {
                let group = matrix.group_of(column);
                if group != latest {
                    (latest, scale, zero_point) = (group, matrix.scale(row, group), matrix.zero_point(row, group));
                }
                *wide = (i32::from(*integer) - zero_point) as f32 * scale;
            }
            let out = &mut out[(first - columns.start) * kept.size()..][..now.len() * kept.size()];
            narrow(&wide[..now.len()], out, kept);
        }
    }
}
