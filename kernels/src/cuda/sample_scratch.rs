//! Pure: the layout of sampling's scratch memory.

use bursar_budgets::Bytes;

use super::contract::sampling as scheme;
use crate::DType;

/// Rows per group. 64 rows fill every GPU; more rows would only need more scratch.
pub(super) const ROWS: usize = 64;

/// Returns the bytes of scratch in which the kernels pass data to each other, for a
/// row of `slices` slices.
fn row_bytes(slices: usize) -> usize {
    (scheme::ROW_BYTES + scheme::SLICE_BYTES * slices).next_multiple_of(scheme::ROW_ALIGNMENT)
}

/// Returns the number of elements from the start of one changed row to the start of the next. Rows
/// are aligned to 16 bytes.
pub(super) fn changed_pitch(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(4)
}

/// Returns the byte offsets of the parts of the scratch: the data that the kernels pass to each
/// other, the changed rows, and a copy of the tokens chosen by the previous step, which only a
/// batch of more than one group has. The last entry is the end of the scratch.
pub(super) fn parts(rows: usize, sequences: usize, vocabulary: usize) -> [Bytes; 4] {
    let at_once = rows.min(ROWS);
    let changed = Bytes((at_once * row_bytes(vocabulary.div_ceil(scheme::SLICE))) as u64);
    let previous = changed + DType::F32.bytes(at_once * changed_pitch(vocabulary));
    let kept = if rows > ROWS { sequences } else { 0 };
    [Bytes::ZERO, changed, previous, previous + DType::U32.bytes(kept)]
}

/// Returns the bytes of scratch for choosing from `rows` rows of `vocabulary` logits for
/// `sequences` sequences.
pub(crate) fn cuda_sample_scratch(rows: usize, sequences: usize, vocabulary: usize) -> Bytes {
    parts(rows, sequences, vocabulary)[3]
}
