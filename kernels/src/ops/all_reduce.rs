//! The sum of what all ranks have, on each of them: partial products of a weight whose columns are shared out.

use super::check;
use crate::{Backend, KernelError, Scope, Tensor, Work};

/// Computes `out = Σ partial`, or adds it to `out` if `accumulate` is set: the partial results of all ranks in the order
/// of their indices, in f32, rounded once. So every rank gets the same bits, and the same ones every time. Through
/// [NCCL](crate::NcclLink) the order is the library's, and sums are rounded on the way.
///
/// All ranks come to the same operations with the same shapes, in the same order. It ends when all have read what this
/// rank brought.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, columns]` activations: what this rank has. A gap between rows is allowed.
    pub partial: Tensor<'a>,
    /// Add to the contents of `out` instead of replacing them.
    pub accumulate: bool,
    /// `[rows, columns]` activations; a gap between rows is allowed.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Writes the sum of all ranks' `partial` `[rows, columns]` to `out` `[rows, columns]`.
    ///
    /// # Errors
    /// Shapes disagree; the device is lost, because a rank did not come.
    pub fn all_reduce_into(&self, partial: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.all_reduce(partial, false, out)
    }

    /// Adds the sum of all ranks' `partial` `[rows, columns]` to `sum` `[rows, columns]`, as a layer adds to the residual
    /// stream.
    ///
    /// # Errors
    /// As [`all_reduce_into`](Scope::all_reduce_into).
    pub fn all_reduce_add(&self, partial: &Tensor<'_>, sum: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.all_reduce(partial, true, sum)
    }

    fn all_reduce(&self, partial: &Tensor<'_>, accumulate: bool, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "all_reduce";
        check::activation(OP, "partial", partial, self.target().activation())?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::writable(OP, "out", out);
        check::shape(OP, "out", out, partial.shape())?;
        let additions = partial.shape().elements() * (self.rank().of() - usize::from(!accumulate));
        let mut work = Work::over(additions as u64, &[partial, out]);
        work.bytes += if accumulate { out.bytes() } else { bursar_budgets::Bytes::ZERO };
        self.count(work);
        self.backend.all_reduce(Call { partial: partial.view(), accumulate, out: out.view() })
    }
}
