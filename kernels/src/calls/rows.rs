//! Rows that are looked up, moved, added or filled.

use crate::{RankShard, Tensor, Weight};

/// Computes `out[i] = table[ids[i]] * scale`, converted to activations. `ids[i]` is the
/// [code](crate::InputToken::code) of a token. If the host has not seen the token yet, its code has
/// the index of a row of `previous`, and `previous[row]` is the token's id. If that entry is
/// [`NO_CHOICE`](super::NO_CHOICE), no token was chosen, and the output row is all zeros. The row
/// of a token that is not in `tokens` is all zeros too.
#[non_exhaustive]
pub struct Embed<'a> {
    /// `[rows, hidden]`, floating point or in blocks, with at least `tokens.count` rows.
    pub table: Weight<'a>,
    /// The tokens of the vocabulary that have a row in the table.
    pub tokens: RankShard,
    /// `[tokens]` u32: codes of tokens. Known ids are below the vocabulary, and the codes of unseen
    /// tokens have indices of rows of `previous`.
    pub ids: Tensor<'a>,
    /// `[rows]` u32, each below the vocabulary or [`NO_CHOICE`](super::NO_CHOICE). The
    /// tensor is empty if all ids are known.
    pub previous: Tensor<'a>,
    /// Factor of all rows, a number of the activations' type.
    pub scale: f32,
    /// `[tokens, hidden]` activations.
    pub out: Tensor<'a>,
}

/// Computes `out[r]` = the mean of the rows `x[r * count]` to `x[(r + 1) * count - 1]`, in f32.
#[non_exhaustive]
pub struct MeanRows<'a> {
    /// `[rows * count, columns]` activations. A gap between rows is allowed.
    pub x: Tensor<'a>,
    /// At least 1.
    pub count: usize,
    /// `[rows, columns]` activations.
    pub out: Tensor<'a>,
}

/// Computes `out[i] = x[rows[i]]`, or copies all rows.
#[non_exhaustive]
pub struct GatherRows<'a> {
    /// `[rows, columns]` activations.
    pub x: Tensor<'a>,
    /// `[chosen]` u32, each below the rows of `x`. `None` stands for every row, in order.
    pub rows: Option<Tensor<'a>>,
    /// `[chosen, columns]` activations.
    pub out: Tensor<'a>,
}

/// Computes `out[rows[i]] = x[i]`. Each row of `out` occurs at most once in `rows`.
#[non_exhaustive]
pub struct ScatterRows<'a> {
    /// `[chosen, columns]` activations.
    pub x: Tensor<'a>,
    /// `[chosen]` u32, each below the rows of `out`.
    pub rows: Tensor<'a>,
    /// `[rows, columns]` activations. Rows whose index is not in `rows` keep their contents.
    pub out: Tensor<'a>,
}

/// Computes `out[to[i]] += x[from[i]]` in f32, rounded once. Each row of `out` occurs at
/// most once in `to`.
#[non_exhaustive]
pub struct AddRows<'a> {
    /// `[rows, columns]` activations.
    pub x: Tensor<'a>,
    /// `[chosen]` u32, each below the number of rows of `x`.
    pub from: Tensor<'a>,
    /// `[chosen]` u32, each below the number of rows of `out`.
    pub to: Tensor<'a>,
    /// `[rows, columns]` activations. Rows whose index is not in `to` keep their contents.
    pub out: Tensor<'a>,
}

/// Fills `out` with the numbers that [`ops::fill_random`](crate::ops::fill_random) defines.
#[non_exhaustive]
pub struct FillRandom<'a> {
    /// Equal seeds give equal numbers.
    pub seed: u64,
    /// Number of elements from the start of one row to the start of the next row in the complete
    /// matrix, of which `out` may be a part.
    pub pitch: usize,
    /// Factor on each element's integer sum: the requested standard deviation divided by the
    /// standard deviation of the sum.
    pub factor: f32,
    /// `[rows, columns]`, contiguous, floating point.
    pub out: Tensor<'a>,
}

/// Increment of the SplitMix64 state for each element of [`FillRandom`].
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
