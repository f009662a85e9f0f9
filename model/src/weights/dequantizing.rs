//! Dequantization of packed integers and FP4 numbers.

use std::ops::Range;

use bursar_kernels::DType;

use super::rounding::narrow;
use crate::checkpoint::{PackedMatrix, PackedScheme};

/// Columns that are dequantized at a time.
const COLUMNS: usize = 512;

/// Writes a part of a packed weight to `out`, row by row, in the weight's element type.
///
/// An element is the product of a scale and either a whole number below 2^9 or an FP4 number. The
/// product with a whole number is exact in f32 if the scale has 16 bits, and it is rounded once to
/// the type of the scale. AutoAWQ (`dequantize_gemm`), AutoGPTQ (`QuantLinear.forward`),
/// compressed-tensors (`dequantize`) and ModelOpt (`NVFP4QTensor.dequantize`) compute the same in
/// torch.
///
/// # Panics
/// If a column's group does not exist.
/// [`WeightMap::refuse_bad_scales`](super::WeightMap::refuse_bad_scales) has already checked this.
pub(super) fn dequantize(matrix: &PackedMatrix<'_>, rows: Range<usize>, columns: Range<usize>, out: &mut [u8]) {
    let kept = DType::from(matrix.dtype());
    let (pitch, groups) = (columns.len() * kept.size(), matrix.groups());
    let of_row = |row| (0..groups).map(move |group| (matrix.scale(row, group), matrix.zero_point(row, group)));
    let of_groups: Vec<_> = rows.clone().flat_map(of_row).collect();
    let (mut integers, mut wide) = (vec![0; rows.len() * COLUMNS], [0.0; COLUMNS]);
    for first in columns.clone().step_by(COLUMNS) {
        let now = first..columns.end.min(first + COLUMNS);
        let integers = &mut integers[..rows.len() * now.len()];
        matrix.integers(rows.clone(), now.clone(), integers);
        let lines = integers.chunks_exact(now.len()).zip(out.chunks_exact_mut(pitch));
        for ((integers, out), of_groups) in lines.zip(of_groups.chunks_exact(groups)) {
            // Adjacent columns of a reordered weight may be in different groups. The elements of a
            // reordered weight are always integers.
            let mut start = now.start;
            if matrix.scheme.is_reordered {
                for ((wide, integer), column) in wide.iter_mut().zip(integers).zip(now.clone()) {
                    let (scale, zero_point) = of_groups[matrix.group_of(column)];
                    *wide = (i32::from(*integer) - zero_point) as f32 * scale;
                }
                start = now.end;
            }
            while start < now.end {
                let end = matrix.group_end(start, now.end);
                let (scale, zero_point) = of_groups[matrix.group_of(start)];
                let run = start - first..end - first;
                widen(matrix.scheme, &integers[run.clone()], (scale, zero_point), &mut wide[run]);
                start = end;
            }
            let out = &mut out[(first - columns.start) * kept.size()..][..now.len() * kept.size()];
            narrow(&wide[..now.len()], out, kept);
        }
    }
}

/// Multiplies elements of one group by their scale.
fn widen(scheme: PackedScheme, elements: &[u8], (scale, zero_point): (f32, i32), out: &mut [f32]) {
    if let Some(numbers) = scheme.format.fp4_numbers() {
        out.iter_mut().zip(elements).for_each(|(out, code)| *out = numbers[usize::from(code & 0xf)] * scale);
    } else {
        let whole = |integer: u8| (i32::from(integer) - zero_point) as f32;
        out.iter_mut().zip(elements).for_each(|(out, integer)| *out = whole(*integer) * scale);
    }
}
