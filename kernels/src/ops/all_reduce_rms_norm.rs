//! All-reduce onto the residual, followed by root-mean-square normalization.

use super::{check, rms_norm::RmsNorm};
use crate::{Activations, Backend, KernelError, Scope, Tensor, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Adds the sum of all ranks' `partial` `[rows, hidden]` to `residual`
    /// `[rows, hidden]`, and writes the rows of the sum to `out`,
    /// normalized as in [`rms_norm_into`](Scope::rms_norm_into).
    ///
    /// # Errors
    /// The shapes disagree, or the device is lost because a rank did not join in time.
    pub fn all_reduce_rms_norm(
        &self,
        partial: &Tensor<'_>,
        residual: &mut Tensor<'_>,
        norm: RmsNorm<'_>,
        out: &mut Activations<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "all_reduce_rms_norm";
        check::added(OP, partial, residual, self.target())?;
        norm.check(OP, residual, out, self.target())?;
        let RmsNorm { weight, weight_offset, epsilon } = norm;
        let operations = partial.shape().elements() * (self.rank().of() + 4);
        let mut work = Work::over(operations as u64, &[partial, residual, residual, weight]);
        work.bytes += out.bytes();
        self.count(work);
        let (partial, residual, weight) = (partial.view(), residual.view(), weight.view());
        self.backend.all_reduce_rms_norm(calls::AllReduceRmsNorm {
            partial,
            residual,
            weight,
            weight_offset,
            epsilon,
            out: out.view(),
        })
    }
}
