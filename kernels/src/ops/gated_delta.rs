//! The gated delta rule: linear attention with a state of fixed size (gated delta net, Yang et al.
//! 2024, arXiv 2412.06464).

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, Scope, StateLayer, Tensor, Work, calls};

use super::check;

pub use crate::calls::{NO_STATE, SNAPSHOTS, StateSequences};

/// The inputs of the gated delta rule, other than the state.
pub struct DeltaInputs<'a> {
    /// `[tokens, channels]` activations: the output of the [convolution](Scope::causal_conv).
    pub qkv: &'a Tensor<'a>,
    /// `[tokens, value_heads]` activations: `b`, whose sigmoid is the strength of the update.
    pub update: &'a Tensor<'a>,
    /// `[tokens, value_heads]` activations: `a`, from which the decay is computed.
    pub decay: &'a Tensor<'a>,
    /// `[value_heads]` f32: the logarithm of each head's rate of decay.
    pub log_decay: &'a Tensor<'a>,
    /// `[value_heads]` f32, added to `decay`.
    pub bias: &'a Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Runs the gated delta rule over the rows of each sequence and updates the states in `layer`.
    /// [`calls::GatedDelta`] has the formula. Returns `[tokens, value_heads * value_dim]`.
    pub fn gated_delta(
        &self,
        inputs: &DeltaInputs<'_>,
        layer: &StateLayer,
        sequences: &StateSequences<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "gated_delta";
        let (shape, rows) = (layer.shape(), inputs.qkv.rows());
        check::activation(OP, "qkv", inputs.qkv, self.target().activation())?;
        check::shape(OP, "qkv", inputs.qkv, [rows, shape.channels])?;
        for (what, gates) in [("update", inputs.update), ("decay", inputs.decay)] {
            check::activation(OP, what, gates, self.target().activation())?;
            check::shape(OP, what, gates, [rows, shape.value_heads])?;
        }
        for (what, of_head) in [("log_decay", inputs.log_decay), ("bias", inputs.bias)] {
            check::f32(OP, what, of_head)?;
            check::shape(OP, what, of_head, [shape.value_heads])?;
        }
        check_sequences(OP, sequences, rows)?;
        let out = self.empty([rows, shape.value_heads * shape.value_dim])?;
        // Four multiply-adds for each element of the state and token: the decay, both products
        // and the update.
        let flops = 8 * rows * shape.value_heads * shape.value_dim * shape.key_dim;
        let mut work = Work::over(flops as u64, &[inputs.qkv, inputs.update, inputs.decay, &out]);
        work.bytes += (shape.slot_bytes() - shape.conv_bytes()) * 2 * sequences.writes.rows() as u64;
        self.count(work);
        let inner = self.scope();
        let has_long = sequences.short_sequences < sequences.context_lengths.rows();
        let bytes = if has_long { self.target().delta_scratch(shape, rows) } else { Bytes::ZERO };
        let scratch = inner.take_scratch(bytes)?;
        self.backend.gated_delta(calls::GatedDelta {
            qkv: inputs.qkv.view(),
            update: inputs.update.view(),
            decay: inputs.decay.view(),
            log_decay: inputs.log_decay.view(),
            bias: inputs.bias.view(),
            layer,
            sequences,
            scratch: scratch.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}

/// Checks the shapes and the types of the index arrays of a step of `rows` rows.
pub(super) fn check_sequences(
    op: &'static str,
    sequences: &StateSequences<'_>,
    rows: usize,
) -> Result<(), KernelError> {
    let count = sequences.context_lengths.rows();
    for (what, list, length) in [
        ("query_starts", &sequences.query_starts, count + 1),
        ("context_lengths", &sequences.context_lengths, count),
        ("reads", &sequences.reads, count),
        ("writes", &sequences.writes, count),
    ] {
        check::index_list(op, what, list)?;
        check::shape(op, what, list, [length])?;
    }
    for (what, list) in [("snapshot_rows", &sequences.snapshot_rows), ("snapshot_slots", &sequences.snapshot_slots)] {
        check::indices(op, what, list)?;
        check::shape(op, what, list, [count, SNAPSHOTS])?;
    }
    let singles = sequences.single_rows;
    check::holds(
        singles <= count.min(rows) && (singles..=count).contains(&sequences.short_sequences),
        op,
        "context_lengths",
        &sequences.context_lengths,
        "an entry for each sequence with few rows, and a row for each sequence with one row",
    )
}
