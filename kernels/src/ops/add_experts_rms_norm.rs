//! The second half of a mixture, and the norm that the next layer begins with: the rows of the residual stream are
//! normalised by what adds them up.

use super::{add_experts, check, rms_norm::RmsNorm, route::Routing};
use crate::{Activations, Backend, KernelError, Scope, Tensor, Weight, Work};

/// Computes `experts`, whose sum is rounded to activations, and then
/// `out = sum / sqrt(mean(sum^2) + epsilon) * weight`, row by row, the mean in `f32`.
#[non_exhaustive]
pub struct Call<'a> {
    /// Which accumulates, and whose routing has all experts here.
    pub experts: add_experts::Call<'a>,
    /// `[out_features]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to the mean square.
    pub epsilon: f32,
    /// `[rows, out_features]` in the formats that were asked for.
    pub out: Activations<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// As [`add_experts`](Scope::add_experts), and writes the rows of `sum` `[rows, out_features]` to `out`, normalised as
    /// by [`rms_norm_into`](Scope::rms_norm_into).
    ///
    /// # Errors
    /// As those.
    ///
    /// # Panics
    /// If some of the experts are elsewhere: what is here is part of a sum.
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
        assert!(routing.held.is_whole(), "{OP}: {:?} have no sum yet", routing.held);
        norm.check(OP, sum, out, self.target())?;
        check::writable(OP, "sum", sum);
        self.sum_of_experts((x.into(), weight.into()), routing, true, sum, |experts| {
            // The sum itself is counted there, and not read again.
            let mut work = Work::over(4 * experts.sum.shape().elements() as u64, &[norm.weight]);
            work.bytes += out.bytes();
            self.count(work);
            let (weight, epsilon) = (norm.weight.view(), norm.epsilon);
            self.backend.add_experts_rms_norm(Call { experts, weight, epsilon, out: out.view() })
        })
    }
}
