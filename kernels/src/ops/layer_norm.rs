//! Layer normalization (Ba et al. 2016, arXiv 1607.06450).

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Normalizes the rows of `x` `[rows, hidden]` to mean 0 and variance 1, scales them by
    /// `weight` `[hidden]` and shifts them by `bias` `[hidden]`. Returns `[rows, hidden]`.
    pub fn layer_norm(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: &Tensor<'_>,
        epsilon: f32,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "layer_norm";
        check::activation(OP, "x", x, self.target().activation())?;
        check::column_weight(OP, "weight", weight, x, self.target())?;
        check::column_weight(OP, "bias", bias, x, self.target())?;
        let out = self.empty(x.shape())?;
        self.count(Work::over(8 * x.shape().elements() as u64, &[x, weight, bias, &out]));
        let (weight, bias) = (weight.view(), bias.view());
        self.backend.layer_norm(calls::LayerNorm { x: x.view(), weight, bias, epsilon, out: out.view() })?;
        Ok(out)
    }
}
