//! Rotary embeddings, writes to the cache, and attention.

use crate::{KvLayer, Tensor};

/// Assignment of each pair of a head's elements to the position axis by which the pair is rotated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PairAxes {
    /// `sections[axis]` consecutive pairs follow each axis, and the sections together cover all
    /// pairs. If positions have one axis, there is one entry.
    Sections(Vec<usize>),
    /// Pairs 1, 4, 7, ... below `3 * .0` follow the second axis, and pairs 2, 5, 8,
    /// ... below `3 * .1` follow the third axis. All other pairs follow the first
    /// axis (Qwen3-VL, arXiv 2511.21631).
    Interleaved(usize, usize),
}

impl PairAxes {
    /// Returns the number of axes that a position must have.
    pub fn count(&self) -> usize {
        match self {
            PairAxes::Sections(sections) => sections.len(),
            PairAxes::Interleaved(..) => 3,
        }
    }

    /// Returns the axis of each of `pairs` pairs.
    pub fn of_pairs(&self, pairs: usize) -> Vec<usize> {
        match self {
            PairAxes::Sections(sections) => {
                let axes = sections.iter().enumerate().flat_map(|(axis, count)| std::iter::repeat_n(axis, *count));
                axes.take(pairs).collect()
            }
            PairAxes::Interleaved(second, third) => {
                let axis = |pair: usize| match pair % 3 {
                    1 if pair < 3 * second => 1,
                    2 if pair < 3 * third => 2,
                    _ => 0,
                };
                (0..pairs).map(axis).collect()
            }
        }
    }

    /// Returns `true` if the axes are defined for exactly `pairs` pairs.
    pub(crate) fn fit(&self, pairs: usize) -> bool {
        match self {
            PairAxes::Sections(sections) => sections.iter().sum::<usize>() == pairs,
            PairAxes::Interleaved(second, third) => 3 * second <= pairs + 1 && 3 * third <= pairs,
        }
    }
}

/// Rotates, in each of the first `heads` heads of a row, the pair of element `i` and element
/// `i + head_dim / 2` by `positions[axis of i][row] * frequencies[i]` (the halves convention).
#[non_exhaustive]
pub struct Rotary<'a> {
    /// `[rows, at least heads * head_dim]` activations, changed in place.
    pub x: Tensor<'a>,
    /// Heads to rotate. The columns after them are unchanged.
    pub heads: usize,
    /// Norm of each head before the rotation.
    pub norm: Option<HeadNorm<'a>>,
    /// `[axes, rows]` u32.
    pub positions: Tensor<'a>,
    /// `[head_dim / 2]` f32.
    pub frequencies: Tensor<'a>,
    /// The axis that each pair follows.
    pub axes: &'a PairAxes,
}

/// A norm of heads (RMS).
#[derive(Debug)]
pub struct HeadNorm<'a> {
    /// `[head_dim]`, the target's type of weights.
    pub weight: Tensor<'a>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
}

/// The slot number of a row whose keys and values are not written. Padding rows have this slot, so
/// that they leave the cache unchanged.
pub const NO_SLOT: u32 = u32::MAX;

/// Norms of each query and key head before rotation (RMS, as in Qwen3, arXiv 2505.09388).
#[derive(Debug)]
pub struct HeadNorms<'m> {
    /// `[head_dim]`, the target's type of weights.
    pub query: Tensor<'m>,
    /// `[head_dim]`, the type of `query`.
    pub key: Tensor<'m>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
    pub values: CachedValues,
}

/// How the values that the cache stores are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachedValues {
    /// The columns of values, unchanged.
    #[default]
    Unchanged,
    /// Each head of the columns of values, divided by its root mean square (Gemma 4).
    Normalized,
    /// Each head of keys before its norm and rotation, divided by its root mean square. Rows have no
    /// value columns.
    NormalizedKeys,
}

impl CachedValues {
    /// Number of key and value heads in a row, for `kv_heads` key heads.
    pub fn row_kv_heads(self, kv_heads: usize) -> usize {
        if self == CachedValues::NormalizedKeys { kv_heads } else { 2 * kv_heads }
    }
}

/// Rotates queries in place, as [`Rotary`] does, but only the first `2 * pairs` elements of each
/// head: pair `i` has the elements `i` and `i + pairs`. Keys are rotated too, and are
/// written with the values of their row to token `slots[row] % 16` of block `slots[row] / 16`,
/// unless the slot is [`NO_SLOT`]. The contents of the key columns are undefined afterward.
#[non_exhaustive]
pub struct RotaryKvWrite<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]` activations: queries, keys, values. With
    /// [`CachedValues::NormalizedKeys`], there are no values. A gap between rows is allowed.
    pub qkv: Tensor<'a>,
    pub heads: usize,
    /// Norms of queries and keys before rotation.
    pub norms: Option<&'a HeadNorms<'a>>,
    /// `[axes, tokens]` u32.
    pub positions: Tensor<'a>,
    /// `[pairs]` f32. Only the first `2 * pairs` elements of each head are rotated.
    pub frequencies: Tensor<'a>,
    /// The axis that each pair follows.
    pub axes: &'a PairAxes,
    /// `[tokens]` u32, each below `16 * blocks` or [`NO_SLOT`].
    pub slots: Tensor<'a>,
    pub layer: &'a KvLayer,
    /// `[2, kv_heads]` f32 for a layer of quantized elements. The keys and values of a head are
    /// divided by their scales and rounded once, to the nearest. Magnitudes above 448 after the
    /// division are clamped to 448, and NaN stays NaN.
    pub scales: Option<Tensor<'a>>,
}

/// Assignment of rows to sequences, and the blocks that contain each sequence's keys and values.
#[derive(Debug)]
pub struct PagedSequences<'m> {
    /// `[sequences + 1]` u32: sequence `s` has the rows `query_starts[s]..query_starts[s + 1]`.
    /// Together the sequences cover all rows from 0.
    pub query_starts: Tensor<'m>,
    /// `[sequences]` u32: tokens in the cache, including this step's rows. A
    /// sequence with one row and length 0 is padding. The output of padding is
    /// zeros. Padding counts toward [`single_rows`](Self::single_rows).
    pub context_lengths: Tensor<'m>,
    /// `[sequences, blocks_max]` u32: the blocks of each sequence, in order. Unused
    /// entries are not read.
    pub block_tables: Tensor<'m>,
    /// Number of leading sequences that have exactly one row, as decoding sequences do. Backends
    /// with a separate kernel for such sequences use it. With a value below the true number, the
    /// result is correct but slower to compute.
    pub single_rows: usize,
    /// `true` if sequences of one row may be adjacent rows of one text, as drafted tokens are. Such
    /// a row attends to tokens that other rows of this step have written, so no backend may read
    /// the cache before these writes have ended.
    pub has_linked_rows: bool,
    /// Number of query-key pairs of attention without a window, over all sequences. The
    /// arithmetic work of attention without a window is proportional to this number.
    pub query_key_pairs: u64,
}

/// The tokens of its sequence that a row attends to. An `Option<usize>`, a window, converts into a
/// causal mask.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMask<'m> {
    /// Maximum number of tokens up to and including the row's own token, at least 1. `None` means
    /// all.
    pub window: Option<usize>,
    /// `[rows]` u32: row `r` also attends to the tokens of its sequence after its own token and
    /// before index `key_ends[r]`, as tokens of a picture do in Gemma 3. The index is at most the
    /// context length, and never decreases within a sequence. It has no effect if it does not
    /// exceed the row's own index, or if the row is one of
    /// [`single_rows`](PagedSequences::single_rows).
    pub key_ends: Option<&'m Tensor<'m>>,
}

impl From<Option<usize>> for AttentionMask<'_> {
    fn from(window: Option<usize>) -> Self {
        AttentionMask { window, key_ends: None }
    }
}

/// Computes attention: row `r` of a sequence's `n` rows attends to that sequence's first
/// `context - n + r + 1` tokens, or, with a window, only to the last `window` of these tokens. With
/// `key_ends`, it also attends to later tokens.
#[non_exhaustive]
pub struct AttentionPaged<'a> {
    /// `[tokens, heads * head_dim]` activations; a gap between rows is allowed.
    pub queries: Tensor<'a>,
    /// Query heads. Each group of `heads / kv_heads` query heads shares one key and value head.
    pub heads: usize,
    /// Factor on the dot products of queries and keys.
    pub scale: f32,
    /// Maximum number of tokens, at least 1, that a row attends to up to and including its own.
    /// `None` means all. A sequence's blocks before the first block that one of its rows attends to
    /// are not read, and neither are the entries of these blocks in the block table.
    pub window: Option<usize>,
    /// See [`AttentionMask::key_ends`].
    pub key_ends: Option<Tensor<'a>>,
    /// The layer's keys and values, including those that this step has written. If every sequence
    /// has one row and [`has_linked_rows`](PagedSequences::has_linked_rows) is `false`, the tokens
    /// before that row may be read before the preceding operation has ended, because they were
    /// written before this step.
    pub layer: &'a KvLayer,
    /// `[2, kv_heads]` f32 for a layer of quantized elements: the scales of each head's keys, then
    /// the scales of each head's values.
    pub scales: Option<Tensor<'a>>,
    pub sequences: &'a PagedSequences<'a>,
    /// Scratch declared with [`Target::paged_scratch`](crate::Target::paged_scratch).
    pub scratch: Tensor<'a>,
    /// `[tokens, heads * head_dim]` activations.
    pub out: Tensor<'a>,
}

/// Computes softmax attention within packed sequences. Each row attends to all rows of its
/// sequence: sequence `s` has the rows `starts[s]..starts[s + 1]`.
#[non_exhaustive]
pub struct AttentionPacked<'a> {
    /// `[rows, 3 * heads * head_dim]` activations: queries, keys, values.
    pub qkv: Tensor<'a>,
    /// Query heads. There are as many key heads and value heads.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the dot products of queries and keys.
    pub scale: f32,
    /// `[sequences + 1]` u32.
    pub starts: Tensor<'a>,
    /// An upper bound on the rows of a sequence.
    pub longest: usize,
    /// Scratch declared with [`Target::packed_scratch`](crate::Target::packed_scratch).
    pub scratch: Tensor<'a>,
    /// `[rows, heads * head_dim]` activations.
    pub out: Tensor<'a>,
}
