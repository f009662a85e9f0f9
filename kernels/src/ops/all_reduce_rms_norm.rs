//! All-reduce onto the residual, followed by root-mean-square normalization.

use super::{
    all_reduce, check,
    rms_norm::{self, RmsNorm},
};
use crate::{Activations, Backend, KernelError, Scope, Tensor, Work};

/// Computes `residual = residual + Σ partial` as [`all_reduce`](all_reduce::Call) does,
/// and then `out = residual / sqrt(mean(residual^2) + epsilon) * weight`, row by row, with
/// the mean in `f32`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, hidden]` activations: this rank's partial result. A gap between rows is allowed.
    pub partial: Tensor<'a>,
    /// `[rows, hidden]` activations, equal on all ranks and updated in place. A gap
    /// between rows is allowed.
    pub residual: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// Constant added to the mean square.
    pub epsilon: f32,
    /// `[rows, hidden]` in the requested formats.
    pub out: Activations<'a>,
}

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
        let RmsNorm { weight, epsilon } = norm;
        let operations = partial.shape().elements() * (self.rank().of() + 4);
        let mut work = Work::over(operations as u64, &[partial, residual, residual, weight]);
        work.bytes += out.bytes();
        self.count(work);
        let (partial, residual, weight) = (partial.view(), residual.view(), weight.view());
        self.backend.all_reduce_rms_norm(Call { partial, residual, weight, epsilon, out: out.view() })
    }
}

/// Calls `all_reduce` and then `rms_norm`.
pub(crate) fn in_two<B: Backend + ?Sized>(backend: &B, call: Call<'_>) -> Result<(), KernelError> {
    let Call { partial, residual, weight, epsilon, out } = call;
    backend.all_reduce(all_reduce::Call { partial, accumulate: true, out: residual.view() })?;
    backend.rms_norm(rms_norm::Call { x: residual, weight, epsilon, out })
}
