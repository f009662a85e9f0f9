//! Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv 1910.07467).

use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Work};

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
    /// `[rows, hidden]` in the formats that were asked for.
    pub out: Activations<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Normalises the rows of `x` `[rows, hidden]` and scales them by `weight` `[hidden]`; returns `[rows, hidden]`.
    pub fn rms_norm(&self, x: &Tensor<'_>, weight: &Tensor<'_>, epsilon: f32) -> Result<Tensor<'_>, KernelError> {
        Ok(self.rms_norm_as(x, weight, epsilon, ActivationFormat::PLAIN)?.plain.expect("it was asked for"))
    }

    /// As [`rms_norm`](Scope::rms_norm), in `format`.
    pub fn rms_norm_as(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        epsilon: f32,
        format: ActivationFormat,
    ) -> Result<Activations<'_>, KernelError> {
        const OP: &str = "rms_norm";
        check::activation(OP, "x", x, self.target().activation())?;
        check::column_weight(OP, "weight", weight, x, self.target())?;
        let out = self.empty_in(format, x.rows(), x.columns())?;
        let mut work = Work::over(4 * x.shape().elements() as u64, &[x, weight]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.rms_norm(Call { x: x.view(), weight: weight.view(), epsilon, out: out.view() })?;
        Ok(out)
    }
}
