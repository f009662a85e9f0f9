//! Layers with a recurrent state. Each sequence is computed token by token, so the result does not
//! depend on how a prompt is divided into steps, unless the states are rounded to bf16 between
//! steps.

use std::slice;

use half::{bf16, slice::HalfFloatSliceExt};

use super::{
    arithmetic::{dot, exp, logistic, silu},
    memory::{Output, Rows, indices, widened, write_rows},
    threads::Threads,
};
use crate::{
    StateDtype, StateLayer,
    calls::{CausalConv, GatedDelta, GatedRmsNorm, NO_STATE, SNAPSHOTS, SigmoidMul, StateSequences},
};

/// Added to the squared length of queries and keys before the square root (transformers 5.17,
/// `l2norm` of `modeling_qwen3_5.py`).
const L2_EPSILON: f32 = 1e-6;

/// One sequence of a step.
struct StateSequence {
    rows: std::ops::Range<usize>,
    /// The slot of the state before the step; `None` if that state is zero.
    read: Option<u32>,
    /// The slot of the state after the last row; `None` if that state is not kept.
    write: Option<u32>,
    /// The row after which the state is also written to a slot, and the slot.
    snapshots: Vec<(usize, u32)>,
}

impl StateSequence {
    /// The slots to which the state is written after `row`.
    fn slots_after(&self, row: usize) -> impl Iterator<Item = u32> {
        let is_here = move |(after, _): &&(usize, u32)| *after == row;
        let last = self.write.filter(|_| row + 1 == self.rows.end);
        self.snapshots.iter().filter(is_here).map(|(_, slot)| *slot).chain(last)
    }

    /// All slots that the sequence writes.
    fn written(&self) -> impl Iterator<Item = u32> {
        self.snapshots.iter().map(|(_, slot)| *slot).chain(self.write)
    }
}

/// Returns the sequences of a step, without padding sequences. Fills the padding rows of `out` with
/// zeros.
///
/// Panics if the sequences are inconsistent, which is a bug in the caller.
fn checked_sequences(
    batch: &StateSequences<'_>,
    layer: &StateLayer,
    out: &Output<'_>,
    columns: usize,
) -> Vec<StateSequence> {
    let (starts, contexts) = (indices(&batch.query_starts), indices(&batch.context_lengths));
    let (reads, writes) = (indices(&batch.reads), indices(&batch.writes));
    let (rows, slots) = (indices(&batch.snapshot_rows), indices(&batch.snapshot_slots));
    let snapshots = rows.chunks_exact(SNAPSHOTS).zip(slots.chunks_exact(SNAPSHOTS));
    let mut sequences = Vec::new();
    for (sequence, (bounds, (rows, slots))) in starts.windows(2).zip(snapshots).enumerate() {
        let range = bounds[0] as usize..bounds[1] as usize;
        if contexts[sequence] == 0 {
            for row in range {
                // SAFETY: no worker has started yet, so nothing else accesses the output.
                unsafe { out.part(row, 0, columns) }.fill(0.0);
            }
            continue;
        }
        assert!(range.len() <= contexts[sequence] as usize, "sequence {sequence} has more rows than tokens");
        let taken = rows.iter().zip(slots).filter(|(_, slot)| **slot != NO_STATE);
        let snapshots = taken.map(|(count, slot)| {
            let count = *count as usize;
            assert!(
                (1..=range.len()).contains(&count),
                "a snapshot after {count} of {} rows is out of range",
                range.len()
            );
            (range.start + count - 1, *slot)
        });
        let sequence = StateSequence {
            read: (range.len() < contexts[sequence] as usize).then(|| reads[sequence]),
            write: Some(writes[sequence]).filter(|slot| *slot != NO_STATE),
            snapshots: snapshots.collect(),
            rows: range,
        };
        if !sequence.rows.is_empty() {
            sequences.push(sequence);
        }
    }
    let written: Vec<_> = sequences.iter().flat_map(StateSequence::written).collect();
    for sequence in &sequences {
        let of_all = written.iter().filter(|slot| Some(**slot) == sequence.read).count();
        let own = sequence.written().filter(|slot| Some(*slot) == sequence.read).count();
        assert!(of_all == own, "a slot that a sequence reads is written by another sequence");
    }
    let distinct: std::collections::BTreeSet<_> = written.iter().collect();
    assert!(distinct.len() == written.len(), "two states are written to the same one of {} slots", layer.slots());
    sequences
}

pub(super) fn causal_conv(threads: &Threads, call: CausalConv<'_>) {
    let shape = call.layer.shape();
    let (x, out, weight) = (Rows::<f32>::of(&call.x), Output::of(&call.out), widened(&call.weight));
    let sequences = checked_sequences(call.sequences, call.layer, &out, shape.channels);
    let width = shape.conv_rows + 1;
    let before: Vec<Vec<f32>> = sequences
        .iter()
        .map(|sequence| match sequence.read {
            // SAFETY: the step has not written a state yet.
            Some(slot) => unsafe { conv_inputs(call.layer, slot) }.to_vec(),
            None => vec![0.0; shape.conv_rows * shape.channels],
        })
        .collect();
    // The convolution's input at `row`. Rows 0 to `conv_rows - 1` come from the state, and row
    // `conv_rows` is the sequence's first row.
    let input = |sequence: usize, row: usize| match row.checked_sub(shape.conv_rows) {
        Some(row) => x.row(sequences[sequence].rows.start + row),
        None => &before[sequence][row * shape.channels..][..shape.channels],
    };
    let items: Vec<(usize, usize)> = sequences
        .iter()
        .enumerate()
        .flat_map(|(sequence, it)| (0..it.rows.len()).map(move |row| (sequence, row)))
        .collect();
    threads.share(items.len(), items.len() * shape.channels * 2 * width, |_, item| {
        let (sequence, row) = items[item];
        // SAFETY: each row is one item, so no two threads write the same row.
        let sums = unsafe { out.part(sequences[sequence].rows.start + row, 0, shape.channels) };
        sums.fill(0.0);
        for tap in 0..width {
            for ((sum, x), weight) in
                sums.iter_mut().zip(input(sequence, row + tap)).zip(weight[tap..].iter().step_by(width))
            {
                *sum += x * weight;
            }
        }
        sums.iter_mut().for_each(|sum| *sum = silu(*sum));
    });
    for (index, sequence) in sequences.iter().enumerate() {
        for row in sequence.rows.clone() {
            for slot in sequence.slots_after(row) {
                // SAFETY: all rows are computed, so nothing reads a state of this layer any more.
                let inputs = unsafe { conv_inputs(call.layer, slot) };
                for (kept, to) in inputs.chunks_exact_mut(shape.channels).enumerate() {
                    to.copy_from_slice(input(index, row - sequence.rows.start + 1 + kept));
                }
            }
        }
    }
}

/// The convolution's inputs `[conv_rows, channels]` in a slot.
///
/// # Safety
/// No other slice of the slot's inputs is alive.
#[allow(clippy::mut_from_ref, reason = "the caller keeps the slots apart")]
unsafe fn conv_inputs(layer: &StateLayer, slot: u32) -> &mut [f32] {
    let shape = layer.shape();
    // SAFETY: the layer's creator guarantees that its slots are valid memory, `conv` checks the
    // slot, and the caller guarantees that the slice is the only one.
    unsafe { slice::from_raw_parts_mut(layer.conv(slot).0 as *mut f32, shape.conv_rows * shape.channels) }
}

/// A value head's matrix `[value_dim, key_dim]` in a slot.
enum Matrix<'l> {
    F32(&'l mut [f32]),
    Bf16(&'l mut [bf16]),
}

impl Matrix<'_> {
    /// # Safety
    /// No other slice of the matrix is alive.
    unsafe fn of(layer: &StateLayer, slot: u32, head: usize) -> Self {
        let (shape, start) = (layer.shape(), layer.matrix(slot, head).0);
        let elements = shape.value_dim * shape.key_dim;
        // SAFETY: the layer's creator guarantees that its slots are valid memory, `matrix` checks
        // the slot and the head, the elements have the shape's type, and the caller guarantees that
        // the slice is the only one.
        unsafe {
            match shape.state_dtype {
                StateDtype::F32 => Matrix::F32(slice::from_raw_parts_mut(start as *mut f32, elements)),
                StateDtype::Bf16 => Matrix::Bf16(slice::from_raw_parts_mut(start as *mut bf16, elements)),
            }
        }
    }

    fn read(&self, state: &mut [f32]) {
        match self {
            Matrix::F32(matrix) => state.copy_from_slice(matrix),
            Matrix::Bf16(matrix) => matrix.convert_to_f32_slice(state),
        }
    }

    fn write(&mut self, state: &[f32]) {
        match self {
            Matrix::F32(matrix) => matrix.copy_from_slice(state),
            Matrix::Bf16(matrix) => matrix.convert_from_f32_slice(state),
        }
    }
}

pub(super) fn gated_delta(threads: &Threads, call: GatedDelta<'_>) {
    let shape = call.layer.shape();
    let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
    let (qkv, out) = (Rows::<f32>::of(&call.qkv), Output::of(&call.out));
    let (update, decay) = (Rows::<f32>::of(&call.update), Rows::<f32>::of(&call.decay));
    let (log_decay, bias) = (Rows::<f32>::of(&call.log_decay).all(), Rows::<f32>::of(&call.bias).all());
    let sequences = checked_sequences(call.sequences, call.layer, &out, shape.value_heads * value_dim);
    let (heads, group) = (shape.value_heads, shape.value_heads / shape.key_heads);
    let rows: usize = sequences.iter().map(|sequence| sequence.rows.len()).sum();
    threads.share(sequences.len() * heads, rows * heads * value_dim * key_dim * 4, |_, item| {
        let (sequence, head) = (&sequences[item / heads], item % heads);
        let mut state = vec![0.0; value_dim * key_dim];
        if let Some(slot) = sequence.read {
            // SAFETY: each sequence and head is one item, so only this thread uses this matrix.
            // `checked_sequences` has checked that no other sequence writes the slot.
            unsafe { Matrix::of(call.layer, slot, head) }.read(&mut state);
        }
        let (mut query, mut key) = (vec![0.0; key_dim], vec![0.0; key_dim]);
        let rate = log_decay[head].exp();
        for row in sequence.rows.clone() {
            let x = qkv.row(row);
            let keys = shape.key_heads * key_dim;
            let vector = |first: usize| &x[first + head / group * key_dim..][..key_dim];
            normalized(vector(0), (key_dim as f32).powf(-0.5), &mut query);
            normalized(vector(keys), 1.0, &mut key);
            let value = &x[2 * keys + head * value_dim..][..value_dim];
            let kept = (-rate * softplus(decay.row(row)[head] + bias[head])).exp();
            let strength = 1.0 / (1.0 + (-update.row(row)[head]).exp());
            // SAFETY: each sequence and head is one item, so no two threads write these elements.
            let out = unsafe { out.part(row, head * value_dim, value_dim) };
            for ((state, value), out) in state.chunks_exact_mut(key_dim).zip(value).zip(out) {
                let change = strength * (value - kept * dot(state, &key));
                state.iter_mut().zip(&key).for_each(|(state, key)| *state = kept * *state + change * key);
                *out = dot(state, &query);
            }
            for slot in sequence.slots_after(row) {
                // SAFETY: each sequence and head is one item, so only this thread uses this matrix.
                // `checked_sequences` has checked that all slots that are written are different.
                unsafe { Matrix::of(call.layer, slot, head) }.write(&state);
            }
        }
    });
}

/// Writes `x` divided by its L2 norm and multiplied by `scale` to `out`.
fn normalized(x: &[f32], scale: f32, out: &mut [f32]) {
    let factor = scale / (dot(x, x) + L2_EPSILON).sqrt();
    out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
}

/// `ln(1 + e^x)`. Above 20, the result equals `x` in f32.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

pub(super) fn gated_rms_norm(threads: &Threads, call: GatedRmsNorm<'_>) {
    let (x, gate) = (Rows::<f32>::of(&call.x), Rows::<f32>::of(&call.gate));
    let weight = Rows::<f32>::of(&call.weight).all();
    write_rows(threads, &call.out, 12, |row, out| {
        let heads = x.row(row).chunks_exact(weight.len()).zip(gate.row(row).chunks_exact(weight.len()));
        for (out, (x, gate)) in out.chunks_exact_mut(weight.len()).zip(heads) {
            let factor = (dot(x, x) / x.len() as f32 + call.epsilon).sqrt().recip();
            for (((out, x), gate), weight) in out.iter_mut().zip(x).zip(gate).zip(weight) {
                *out = x * factor * weight * silu(*gate);
            }
        }
    });
}

pub(super) fn sigmoid_mul(threads: &Threads, call: SigmoidMul<'_>) {
    let gate = Rows::<f32>::of(&call.gate);
    write_rows(threads, &call.x, 8, |row, x| {
        let gate = gate.row(row);
        if let [gate] = gate {
            let factor = logistic(*gate);
            x.iter_mut().for_each(|x| *x *= factor);
        } else {
            x.iter_mut().zip(gate).for_each(|(x, gate)| *x /= 1.0 + exp(-gate));
        }
    });
}
