//! Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv 1910.07467).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `out = x / sqrt(mean(x^2) + epsilon) * weight`, row by row, the mean in `f32`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, hidden]` activations.
    pub x: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to the mean square.
    pub epsilon: f32,
    /// `[rows, hidden]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Normalises the rows of `x` `[rows, hidden]` and scales them by `weight` `[hidden]`; returns `[rows, hidden]`.
    pub fn rms_norm(&self, x: &Tensor<'_>, weight: &Tensor<'_>, epsilon: f32) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "rms_norm";
        check::activation(OP, "x", x, self.target().activation())?;
        check::column_weight(OP, "weight", weight, x, self.target())?;
        let out = self.empty(x.shape())?;
        self.count(Work::over(4 * x.shape().elements() as u64, &[x, weight, &out]));
        self.backend.rms_norm(Call { x: x.view(), weight: weight.view(), epsilon, out: out.view() })?;
        Ok(out)
    }
}
