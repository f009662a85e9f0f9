//! Layers with a recurrent state: the causal convolution and the gated delta rule.

use crate::{StateLayer, Tensor};

/// The slot number of a state that is not written and of a snapshot that is not taken.
pub const NO_STATE: u32 = u32::MAX;

/// Maximum number of snapshots of one sequence's state per step.
pub const SNAPSHOTS: usize = 2;

/// Assignment of rows to sequences, and the slots of each sequence's state.
///
/// A sequence's state before the step is in the slot that it reads, and its state after the step is
/// written to the slot that it writes. Both may be the same slot. If a sequence reads a slot, no
/// other sequence of the step may write this slot.
#[derive(Debug)]
pub struct StateSequences<'m> {
    /// `[sequences + 1]` u32: sequence `s` has the rows `query_starts[s]..query_starts[s + 1]`.
    pub query_starts: Tensor<'m>,
    /// `[sequences]` u32: tokens of the sequence, including this step's rows. If the sequence has
    /// no other tokens, the state before the step is zero and no slot is read. A sequence of length
    /// 0 is padding.
    pub context_lengths: Tensor<'m>,
    /// `[sequences]` u32: the slot with the state before the step.
    pub reads: Tensor<'m>,
    /// `[sequences]` u32: the slot for the state after the step. [`NO_STATE`] for padding, and for
    /// a sequence with draft rows, whose state before the drafts is written as a snapshot instead.
    pub writes: Tensor<'m>,
    /// `[sequences, SNAPSHOTS]` u32: a number of rows, counted from the sequence's first row in
    /// this step. After this many rows, the state is also written to another slot.
    pub snapshot_rows: Tensor<'m>,
    /// `[sequences, SNAPSHOTS]` u32: the slot of each snapshot, or [`NO_STATE`] for none.
    pub snapshot_slots: Tensor<'m>,
    /// Number of leading sequences that have exactly one row, as decoding sequences do.
    pub single_rows: usize,
    /// Number of leading sequences with few rows, at least [`single_rows`](Self::single_rows). The
    /// gated delta rule computes them token by token on every target, so that a token changes the
    /// state in the same way in a decoding step and in a step that verifies drafts.
    pub short_sequences: usize,
}

/// Computes a depthwise causal convolution over the rows of each sequence, followed by SiLU:
/// `y[row] = sum over i of weight[i] * x[row - width + 1 + i]` and `out = y / (1 + exp(-y))`. Rows
/// before the step come from the sequence's state. The state is updated to the last `width - 1`
/// rows of `x`.
#[non_exhaustive]
pub struct CausalConv<'a> {
    /// `[tokens, channels]` activations; a gap between rows is allowed.
    pub x: Tensor<'a>,
    /// `[channels, width]`, floating point.
    pub weight: Tensor<'a>,
    pub layer: &'a StateLayer,
    pub sequences: &'a StateSequences<'a>,
    /// `[tokens, channels]` activations. The rows of padding are zeros.
    pub out: Tensor<'a>,
}

/// Computes the gated delta rule (Yang et al. 2024, arXiv 2412.06464) over the rows of each
/// sequence. Each value head has a state `S` `[key_dim, value_dim]`, which is zero before the first
/// token and is stored as the layer's [`StateDtype`](crate::StateDtype). For each token, with `q`
/// and `k` divided by their L2 norms and `q` multiplied by `key_dim^-0.5`, all in f32:
///
/// ```text
/// decay = exp(-exp(log_decay) * softplus(a + bias))
/// S     = decay * S
/// S     = S + k (sigmoid(b) * (v - k^T S))^T
/// out   = q^T S
/// ```
///
/// The value head `h` uses the key head `h / (value_heads / key_heads)`.
#[non_exhaustive]
pub struct GatedDelta<'a> {
    /// `[tokens, channels]` activations: queries and keys `[key_heads, key_dim]`, then values
    /// `[value_heads, value_dim]`. A gap between rows is allowed.
    pub qkv: Tensor<'a>,
    /// `[tokens, value_heads]` activations: `b`. A gap between rows is allowed.
    pub update: Tensor<'a>,
    /// `[tokens, value_heads]` activations: `a`. A gap between rows is allowed.
    pub decay: Tensor<'a>,
    /// `[value_heads]` f32: logarithm of the rate of decay.
    pub log_decay: Tensor<'a>,
    /// `[value_heads]` f32, added to `decay`.
    pub bias: Tensor<'a>,
    pub layer: &'a StateLayer,
    pub sequences: &'a StateSequences<'a>,
    /// Scratch declared with [`Target::delta_scratch`](crate::Target::delta_scratch). Empty if all
    /// sequences have few rows ([`short_sequences`](StateSequences::short_sequences)).
    pub scratch: Tensor<'a>,
    /// `[tokens, value_heads * value_dim]` activations. The rows of padding are zeros.
    pub out: Tensor<'a>,
}

/// For each head of each row, computes
/// `out = x / sqrt(mean(x^2) + epsilon) * weight * gate / (1 + exp(-gate))`, with the mean in f32.
#[non_exhaustive]
pub struct GatedRmsNorm<'a> {
    /// `[rows, heads * head_dim]` activations.
    pub x: Tensor<'a>,
    /// `[rows, heads * head_dim]` activations; a gap between rows is allowed.
    pub gate: Tensor<'a>,
    /// `[head_dim]` f32, the same for all heads.
    pub weight: Tensor<'a>,
    /// Constant added to the mean square.
    pub epsilon: f32,
    /// `[rows, heads * head_dim]` activations.
    pub out: Tensor<'a>,
}

/// Computes `x = x / (1 + exp(-gate))`.
#[non_exhaustive]
pub struct SigmoidMul<'a> {
    /// `[rows, columns]` activations, changed in place.
    pub x: Tensor<'a>,
    /// `[rows, columns]` activations, or `[rows, 1]` for one gate for each row. A gap between rows
    /// is allowed.
    pub gate: Tensor<'a>,
}
