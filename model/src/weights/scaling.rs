//! Scales of the checkpoint: a layer's output scale, which is folded into the projection before it,
//! and the scales of quantized weights.

use bursar_kernels::DType;
use rayon::prelude::*;

use super::{
    SpreadScales,
    rounding::{buffer_for, widen_all, widen_scaled_to_bytes},
    unpacking::unpacked_parts,
};
use crate::checkpoint::TensorInfo;

/// Elements that are scaled at a time: 32 MiB of f32.
const SCALED_AT_ONCE: usize = 1 << 23;

/// Minimum number of elements that one thread scales.
const BY_A_THREAD: usize = 1 << 14;

/// Calls `each` with the bytes of the rows of `found` as f32, in order. Each row is multiplied by
/// its element of `scale`. The rows of a one-dimensional `found` have one element. `buffer` grows
/// to 32 MiB, or to one row if a row is larger. A tensor that has to be unpacked needs a second
/// buffer with the same limit.
///
/// # Panics
/// If the number of rows differs from the number of elements of `scale`. The weight map has already
/// checked that they are equal.
pub(super) fn scaled_parts<E>(
    found: &TensorInfo<'_>,
    scale: &TensorInfo<'_>,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (scale, from) = (numbers(scale), DType::from(found.dtype));
    let columns = found.shape.iter().product::<usize>() / scale.len();
    let (row, wide) = (columns * from.size(), columns * size_of::<f32>());
    let (mut scales, mut unpacked) = (scale.as_slice(), Vec::new());
    unpacked_parts(found, &mut unpacked, |part| {
        part.chunks((SCALED_AT_ONCE / columns).max(1) * row).try_for_each(|rows| {
            let (now, later) = scales.split_at(rows.len() / row);
            scales = later;
            let out = buffer_for(buffer, now.len() * wide);
            let places = out.par_chunks_exact_mut(wide).with_min_len(BY_A_THREAD.div_ceil(columns));
            places.zip(rows.par_chunks_exact(row)).zip(now).for_each(|((out, row), scale)| {
                widen_scaled_to_bytes(row, from, *scale, out);
            });
            each(out)
        })
    })
}

/// All elements of a tensor as f32.
pub(super) fn numbers(found: &TensorInfo<'_>) -> Vec<f32> {
    let (from, mut wide) = (DType::from(found.dtype), Vec::new());
    let each = |part: &[u8]| {
        let at = wide.len();
        wide.resize(at + part.len() / from.size(), 0.0);
        widen_all(part, from, &mut wide[at..]);
        Ok::<_, std::convert::Infallible>(())
    };
    let Ok(()) = unpacked_parts(found, &mut Vec::new(), each);
    wide
}

/// The scales of `found` in the order of the weight's blocks.
pub(super) fn spread(found: &TensorInfo<'_>, how: SpreadScales) -> Vec<f32> {
    let (all, [down, across]) = (numbers(found), how.shape);
    let mut out = Vec::with_capacity(how.count * how.rows * across);
    for matrix in all.chunks_exact(down * across) {
        for row in 0..how.rows {
            let row = row / how.times;
            let at = |column: usize| if how.swapped { column * down + row } else { row * across + column };
            out.extend((0..across).map(|column| matrix[at(column)]));
        }
    }
    out
}
