//! Choices of tokens.

use crate::{Tensor, sampling::SampleLayout};

/// The result for a row without a chosen token, such as a row that has only NaN.
pub const NO_CHOICE: u32 = u32::MAX;

/// Computes `out[i]`, the first index of the largest element of row `i`. NaN is never chosen over a
/// number. The result for a row that has only NaN is [`NO_CHOICE`].
#[non_exhaustive]
pub struct Argmax<'a> {
    /// `[rows, columns]` activations or f32.
    pub x: Tensor<'a>,
    /// `[columns]` u32, contiguous: the results to write in place of the indices. `None` writes the
    /// indices.
    pub ids: Option<Tensor<'a>>,
    /// `[rows]` u32: indices of columns or their ids, or [`NO_CHOICE`].
    pub out: Tensor<'a>,
}

/// Maximum number of clusters of a vocabulary, whose scores a thread block holds in registers.
pub const CLUSTERS_MAX: usize = 4096;

/// Computes `out[i]`: of the tokens in the best clusters of row `i`, the token whose row of `table` has
/// the largest dot product with row `i` of `x`. Of equal products, the smallest token wins. NaN products
/// are ignored. If all are NaN, the result is [`NO_CHOICE`].
#[non_exhaustive]
pub struct ClusteredArgmax<'a> {
    /// `[rows, width]` activations.
    pub x: Tensor<'a>,
    /// `[vocabulary, width]` in the target's type of weights, contiguous. Padding rows may follow.
    pub table: Tensor<'a>,
    /// `[rows, clusters]` f32: a score of each cluster, of which there are at most [`CLUSTERS_MAX`].
    pub scores: Tensor<'a>,
    /// `[vocabulary]` u32, contiguous: the tokens of the first cluster, then of the second, and so on.
    pub tokens: Tensor<'a>,
    /// From 1 to the number of clusters. A cluster is one of a row's best if its score is at least the
    /// row's `top`-th largest score. NaN is below every number.
    pub top: usize,
    /// `[rows]` u32: tokens, or [`NO_CHOICE`].
    pub out: Tensor<'a>,
}

/// Computes `chosen[i]` for each row by [`choose`](crate::sampling::choose), or [`NO_CHOICE`],
/// and writes the report.
#[non_exhaustive]
pub struct Sample<'a> {
    /// `[rows, vocabulary]` f32.
    pub logits: Tensor<'a>,
    /// `[words]` u32, contiguous: a packed batch, aligned to 8 bytes. Unused words
    /// may follow the batch.
    pub asked: Tensor<'a>,
    /// The positions of the parts of `asked` and of the report, and the number of rows.
    pub layout: SampleLayout,
    /// Scratch declared with [`Target::sample_scratch`](crate::Target::sample_scratch).
    pub scratch: Tensor<'a>,
    /// `[sequences]` u32, contiguous, at least as many as rows. Produced tokens that the host does
    /// not know yet are read from this tensor before any of the first `rows` entries is written.
    pub chosen: Tensor<'a>,
    /// `[words]` u32, contiguous, at least as long as the layout requires; see
    /// [`outcomes`](crate::ops::sample::outcomes).
    pub report: Tensor<'a>,
}
