//! Root-mean-square normalization of rows that are added to a residual stream, for layers whose
//! results are normalized (Gemma 2, arXiv 2408.00118).

use crate::{Activations, Backend, KernelError, Scope, Tensor, Work, calls};

use super::{check, rms_norm::RmsNorm};

impl<B: Backend> Scope<'_, B> {
    /// Normalizes the rows of `x` `[rows, hidden]`, scales them by the weight of `norm`, and adds
    /// the result to `sum` `[rows, hidden]`. The new `sum` is then multiplied by `factor` `[1]` f32,
    /// if it is given. `x` and `sum` may have gaps between their rows.
    pub fn rms_norm_add(
        &self,
        x: &Tensor<'_>,
        norm: RmsNorm<'_>,
        factor: Option<&Tensor<'_>>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "rms_norm_add";
        norm.check(OP, x, &Activations::of_plain(sum.view()), self.target())?;
        if let Some(factor) = factor {
            check::f32(OP, "factor", factor)?;
            check::shape(OP, "factor", factor, [1])?;
        }
        let mut work = Work::over(5 * x.shape().elements() as u64, &[x, norm.weight]);
        work.bytes += sum.dtype().bytes(2 * sum.shape().elements());
        self.count(work);
        let RmsNorm { weight, weight_offset, epsilon } = norm;
        self.backend.rms_norm_add(calls::RmsNormAdd {
            x: x.view(),
            weight: weight.view(),
            weight_offset,
            epsilon,
            factor: factor.map(Tensor::view),
            sum: sum.view(),
        })
    }
}
