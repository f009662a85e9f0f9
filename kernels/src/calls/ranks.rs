//! Collectives of the ranks that compute a model together.

use crate::{Activations, Tensor};

/// Computes `out = Σ partial`, or adds the sum to `out` if `accumulate` is set. The partial results
/// of all ranks are summed in f32 in the order of the ranks' indices, and rounded once. Therefore
/// all ranks get the same bits, and repeated calls give the same bits. With [NCCL](crate::NcclLink)
/// the library determines the order, and intermediate sums are rounded.
///
/// All ranks must call the same collectives with the same shapes in the same order. The collective
/// ends on a rank when all ranks have read that rank's `partial`.
#[non_exhaustive]
pub struct AllReduce<'a> {
    /// `[rows, columns]` activations: this rank's partial result. A gap between rows is allowed.
    pub partial: Tensor<'a>,
    /// `true` to add to the contents of `out` instead of replacing them.
    pub accumulate: bool,
    /// `[rows, columns]` activations. A gap between rows is allowed.
    pub out: Tensor<'a>,
}

/// Computes `residual = residual + Σ partial` as [`AllReduce`] does, and then
/// `out = residual / sqrt(mean(residual^2) + epsilon) * (weight + weight_offset)`, row by row, with
/// the mean in `f32`.
#[non_exhaustive]
pub struct AllReduceRmsNorm<'a> {
    /// `[rows, hidden]` activations: this rank's partial result. A gap between rows is allowed.
    pub partial: Tensor<'a>,
    /// `[rows, hidden]` activations, equal on all ranks and updated in place. A gap
    /// between rows is allowed.
    pub residual: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
    /// `[rows, hidden]` in the requested formats.
    pub out: Activations<'a>,
}

/// Computes `out[:, rank * columns..][..columns] = part` for each rank and its `part`. The rules
/// for the order of calls and for the end of the collective are the same as for [`AllReduce`].
#[non_exhaustive]
pub struct AllGather<'a> {
    /// `[rows, columns]` activations or f32: this rank's columns. A gap between rows is allowed.
    pub part: Tensor<'a>,
    /// `[rows, ranks * columns]` of the same type. A gap between rows is allowed.
    pub out: Tensor<'a>,
}

/// For each row `i`, picks the largest of the elements that the ranks found in their own columns.
/// `out[i]` becomes the index of this element among the concatenated columns of all ranks. Among
/// equal elements, the lowest index wins. A rank whose columns have only NaN is ignored, and a row
/// that has only NaN on all ranks gives [`NO_CHOICE`](super::NO_CHOICE). The rules for the order of
/// calls and for the end of the collective are the same as for [`AllReduce`].
#[non_exhaustive]
pub struct BestOfRanks<'a> {
    /// `[rows, columns]` f32: this rank's columns. A gap between rows is allowed.
    pub x: Tensor<'a>,
    /// Index of this rank's first column among the columns of all ranks.
    pub first: usize,
    /// `[rows]` u32. Before the call, the [`argmax`](super::Argmax) of each row of `x`. After the
    /// call, the result.
    pub out: Tensor<'a>,
}
