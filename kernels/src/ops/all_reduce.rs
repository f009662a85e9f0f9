//! All-reduce: the sum of the tensors of all ranks, on each rank. This collective combines the
//! partial results of a GEMM whose weight's columns are divided among the ranks.

use super::check;
use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Writes the sum of all ranks' `partial` `[rows, columns]` to `out` `[rows, columns]`.
    ///
    /// # Errors
    /// The shapes disagree, or the device is lost because a rank did not join in time.
    pub fn all_reduce_into(&self, partial: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.all_reduce(partial, false, out)
    }

    /// Adds the sum of all ranks' `partial` `[rows, columns]` to `sum` `[rows, columns]`, as a
    /// layer adds to the residual stream.
    ///
    /// # Errors
    /// The errors of [`all_reduce_into`](Scope::all_reduce_into).
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
        self.backend.all_reduce(calls::AllReduce { partial: partial.view(), accumulate, out: out.view() })
    }
}
