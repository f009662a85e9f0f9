//! Multiplication of rows by a vector of the checkpoint: a layer's output scale, which is folded
//! into the projection before it.

use rayon::prelude::*;

use super::{
    map::dtype,
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
pub(crate) fn scaled_parts<E>(
    found: &TensorInfo<'_>,
    scale: &TensorInfo<'_>,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (scale, from) = (numbers(scale), dtype(found.dtype));
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
pub(crate) fn numbers(found: &TensorInfo<'_>) -> Vec<f32> {
    let (from, mut wide) = (dtype(found.dtype), Vec::new());
    let each = |part: &[u8]| {
        let at = wide.len();
        wide.resize(at + part.len() / from.size(), 0.0);
        widen_all(part, from, &mut wide[at..]);
        Ok::<_, std::convert::Infallible>(())
    };
    let Ok(()) = unpacked_parts(found, &mut Vec::new(), each);
    wide
}
