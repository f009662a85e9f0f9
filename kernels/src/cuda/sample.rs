//! Launches of sampling: four kernels per group of rows.

use bursar_budgets::{Address, Bytes};

use super::{
    Cuda,
    launch::{Extent, arguments, count},
};
use crate::{
    DType, KernelError,
    ops::sample::Call,
    sampling::{ROW_WORDS, SampleLayout, TOP_MAX},
};

/// Rows per group. 64 fill every GPU; more would only need more scratch.
const ROWS: usize = 64;

/// Tokens per slice, which is one block's share of a row.
const SLICE: usize = 4096;

/// Bytes that the kernels pass on for a row of `slices` slices: the formula in
/// `kernels/cuda/include/sampling/scratch.cuh`.
fn row_bytes(slices: usize) -> usize {
    (45_184 + 304 * slices).next_multiple_of(128)
}

/// Elements from one changed row to the next; rows are aligned to 16 bytes.
fn changed_pitch(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(4)
}

/// Byte offsets of the parts of the scratch: what the kernels pass on, the changed rows, the previous step's choices;
/// then its end.
fn parts(rows: usize, sequences: usize, vocabulary: usize) -> [Bytes; 4] {
    let at_once = rows.min(ROWS);
    let changed = Bytes((at_once * row_bytes(vocabulary.div_ceil(SLICE))) as u64);
    let previous = changed + DType::F32.bytes(at_once * changed_pitch(vocabulary));
    let kept = if rows > ROWS { sequences } else { 0 };
    [Bytes::ZERO, changed, previous, previous + DType::U32.bytes(kept)]
}

pub(crate) fn cuda_sample_scratch(rows: usize, sequences: usize, vocabulary: usize) -> Bytes {
    parts(rows, sequences, vocabulary)[3]
}

pub(super) fn sample(cuda: &Cuda, call: Call<'_>) -> Result<(), KernelError> {
    let SampleLayout { rows, vocabulary } = call.layout;
    let sequences = call.chosen.rows();
    let mut previous = call.chosen.address();
    if rows > ROWS {
        // The first rows' choices overwrite tokens that the next rows' lists may name.
        previous = call.scratch.address().offset(parts(rows, sequences, vocabulary)[2]);
        let arguments = arguments![call.chosen.address(), count(sequences), previous];
        // SAFETY: these are the kernel's parameters, and the scratch has room for them.
        unsafe { cuda.launch("sample_previous_u32", Extent::line(sequences.div_ceil(256), 256), arguments)? };
    }
    (0..rows).step_by(ROWS).try_for_each(|first| some_rows(cuda, &call, first, previous))
}

/// One group of rows, starting at `first`.
fn some_rows(cuda: &Cuda, call: &Call<'_>, first: usize, previous: Address) -> Result<(), KernelError> {
    let SampleLayout { rows: batch_rows, vocabulary } = call.layout;
    let rows = ROWS.min(batch_rows - first);
    let slices = vocabulary.div_ceil(SLICE);
    let requests = call.asked.address().offset(DType::U32.bytes(first * ROW_WORDS));
    let logits = call.logits.address().offset(DType::F32.bytes(first * call.logits.pitch()));
    let pitch = call.logits.pitch() as u64;
    let scratch = call.scratch.address();
    let changed = scratch.offset(parts(batch_rows, call.chosen.rows(), vocabulary)[1]);
    let changed_pitch = changed_pitch(vocabulary) as u64;
    let by_slice = Extent { grid: [slices, rows, 1], block: [256, 1], shared: 0 };
    let slices_arguments = arguments![
        logits,
        pitch,
        count(vocabulary),
        call.asked.address(),
        count(batch_rows),
        count(first),
        previous,
        count(call.chosen.rows()),
        changed,
        changed_pitch,
        scratch,
    ];
    let [faults, own, ids, logarithms] = call.layout.report_parts();
    let report = |place: usize| call.report.address().offset(DType::U32.bytes(place));
    let choose_arguments = arguments![
        logits,
        pitch,
        changed,
        changed_pitch,
        count(vocabulary),
        requests,
        scratch,
        call.chosen.address().offset(DType::U32.bytes(first)),
        report(faults + first),
        report(own + first),
        report(ids + first * TOP_MAX),
        report(logarithms + first * TOP_MAX),
        count(TOP_MAX),
    ];
    let gather_arguments = arguments![logits, pitch, changed, changed_pitch, count(vocabulary), requests, scratch];
    // SAFETY: these are the kernels' parameters. The front has checked the shapes, and `SampleBatch::pack` made the
    // indices.
    unsafe {
        cuda.launch("sample_slices_f32", by_slice, slices_arguments)?;
        cuda.launch("sample_plan_f32", Extent::line(rows, 512), arguments![count(vocabulary), requests, scratch])?;
        cuda.launch("sample_gather_f32", by_slice, gather_arguments)?;
        cuda.launch("sample_choose_f32", Extent::line(rows, 1024), choose_arguments)
    }
}
