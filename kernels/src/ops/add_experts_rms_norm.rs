//! The second half of a mixture of gated MLPs, fused with the norm at the start of the next layer.
//! The operation that computes the rows of the residual stream also normalizes these rows.

use super::{check, rms_norm::RmsNorm, route::Routing};
use crate::{Activations, Backend, KernelError, Scope, Tensor, Weight, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Like [`add_experts`](Scope::add_experts), and also writes the rows of `sum`
    /// `[rows, out_features]` to `out`, normalized as in [`rms_norm_into`](Scope::rms_norm_into).
    ///
    /// # Errors
    /// The errors of [`add_experts`](Scope::add_experts) and
    /// [`rms_norm_into`](Scope::rms_norm_into).
    ///
    /// # Panics
    /// If this rank does not have all experts, because `sum` would be only a partial sum.
    pub fn add_experts_rms_norm<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
        sum: &mut Tensor<'_>,
        norm: RmsNorm<'_>,
        out: &mut Activations<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "add_experts_rms_norm";
        assert!(routing.held.is_whole(), "{OP} needs all experts, but this rank has {:?}", routing.held);
        norm.check(OP, sum, out, self.target())?;
        check::writable(OP, "sum", sum);
        self.sum_of_experts((x.into(), weight.into()), routing, true, sum, |experts| {
            // `sum_of_experts` has counted the bytes of `sum`, which is not read
            // again for the norm.
            let mut work = Work::over(4 * experts.sum.shape().elements() as u64, &[norm.weight]);
            work.bytes += out.bytes();
            self.count(work);
            let RmsNorm { weight, weight_offset, epsilon } = norm;
            let (weight, out) = (weight.view(), out.view());
            let call = calls::AddExpertsRmsNorm { experts, weight, weight_offset, epsilon, out };
            self.backend.add_experts_rms_norm(call)
        })
    }
}
