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
