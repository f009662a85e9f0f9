//! Launches of sampling: four kernels per group of rows.

use bursar_budgets::Address;

use super::{
    arguments::{Extent, arguments, count},
    contract::sampling as scheme,
    lane::Cuda,
    sample_scratch::{ROWS, changed_pitch, parts},
};
use crate::{
    DType, KernelError,
    calls::Sample,
    sampling::{ROW_WORDS, SampleLayout, TOP_MAX},
};

pub(super) fn sample(cuda: &Cuda, call: Sample<'_>) -> Result<(), KernelError> {
    let SampleLayout { rows, vocabulary } = call.layout;
    let sequences = call.chosen.rows();
    let mut previous = call.chosen.address();
    if rows > ROWS {
        // The tokens chosen for the first rows overwrite tokens that the lists of later rows may
        // refer to, so those tokens are copied first.
        previous = call.scratch.address().offset(parts(rows, sequences, vocabulary)[2]);
        let arguments = arguments![call.chosen.address(), count(sequences), previous];
        let threads = scheme::PREVIOUS_THREADS;
        let extent = Extent::line(sequences.div_ceil(threads), threads);
        // SAFETY: the arguments match the kernel's parameters, and the scratch has space
        // for the copied tokens.
        unsafe { cuda.launch(cuda.entry_points().sample_previous, extent, arguments)? };
    }
    (0..rows).step_by(ROWS).try_for_each(|first| some_rows(cuda, &call, first, previous))
}

/// Samples one group of rows, starting at `first`.
fn some_rows(cuda: &Cuda, call: &Sample<'_>, first: usize, previous: Address) -> Result<(), KernelError> {
    let SampleLayout { rows: batch_rows, vocabulary } = call.layout;
    let rows = ROWS.min(batch_rows - first);
    let slices = vocabulary.div_ceil(scheme::SLICE);
    let requests = call.asked.address().offset(DType::U32.bytes(first * ROW_WORDS));
    let logits = call.logits.address().offset(DType::F32.bytes(first * call.logits.pitch()));
    let pitch = call.logits.pitch() as u64;
    let scratch = call.scratch.address();
    let changed = scratch.offset(parts(batch_rows, call.chosen.rows(), vocabulary)[1]);
    let changed_pitch = changed_pitch(vocabulary) as u64;
    let by_slice = Extent { grid: [slices, rows, 1], block: [scheme::SLICE_THREADS, 1], shared: 0 };
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
    let plan_arguments = arguments![count(vocabulary), requests, scratch];
    let gather_arguments = arguments![logits, pitch, changed, changed_pitch, count(vocabulary), requests, scratch];
    let kernels = cuda.entry_points();
    // SAFETY: the arguments match the kernels' parameters. The op layer has checked the shapes, and
    // `SampleBatch::pack` has written the indices into the batch that the kernels read.
    unsafe {
        cuda.launch(kernels.sample_slices, by_slice, slices_arguments)?;
        cuda.launch(kernels.sample_plan, Extent::line(rows, scheme::PLAN_THREADS), plan_arguments)?;
        cuda.launch(kernels.sample_gather, by_slice, gather_arguments)?;
        cuda.launch(kernels.sample_choose, Extent::line(rows, scheme::CHOICE_THREADS), choose_arguments)
    }
}
