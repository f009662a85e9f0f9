//! Rows multiplied by a vector of the checkpoint: a layer's output scale, folded into the projection in front of it.

use rayon::prelude::*;

use super::{map::dtype, rounding::widen_all, unpacking::unpacked_parts};
use crate::checkpoint::TensorInfo;

/// The rows of `found` as f32, each multiplied by its element of `scale`. A `found` of one dimension has rows of one
/// element.
///
/// # Panics
/// If the rows are not as many as the elements of `scale`: the map has checked both.
pub(crate) fn scaled_rows(found: &TensorInfo<'_>, scale: &TensorInfo<'_>) -> Vec<f32> {
    let (mut rows, scale) = (widened(found), widened(scale));
    let columns = rows.len() / scale.len();
    assert_eq!(columns * scale.len(), rows.len(), "a scale has an element for each row");
    rows.par_chunks_mut(columns)
        .zip(&scale)
        .for_each(|(row, scale)| row.iter_mut().for_each(|number| *number *= scale));
    rows
}

fn widened(found: &TensorInfo<'_>) -> Vec<f32> {
    let (found_type, mut wide) = (dtype(found.dtype), Vec::new());
    let each = |part: &[u8]| {
        let from = wide.len();
        wide.resize(from + part.len() / found_type.size(), 0.0);
        widen_all(part, found_type, &mut wide[from..]);
        Ok::<_, std::convert::Infallible>(())
    };
    let Ok(()) = unpacked_parts(found, &mut Vec::new(), each);
    wide
}
