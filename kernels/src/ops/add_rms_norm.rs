//! Residual addition followed by root-mean-square normalisation, in one pass over the row.

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `residual = residual + x`, rounded to activations, and then
/// `out = residual / sqrt(mean(residual^2) + epsilon) * weight`, row by row, the mean in `f32`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, hidden]` activations.
    pub x: Tensor<'a>,
    /// `[rows, hidden]` activations, changed in place.
    pub residual: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to the mean square.
    pub epsilon: f32,
    /// `[rows, hidden]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Adds `x` `[rows, hidden]` to `residual` `[rows, hidden]` in place and returns the sum normalised as by
    /// [`rms_norm`](Scope::rms_norm), `[rows, hidden]`.
    pub fn add_rms_norm(
        &self,
        x: &Tensor<'_>,
        residual: &mut Tensor<'_>,
        weight: &Tensor<'_>,
        epsilon: f32,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "add_rms_norm";
        check::added(OP, x, residual, self.target())?;
        check::column_weight(OP, "weight", weight, x, self.target())?;
        let out = self.empty(x.shape())?;
        self.count(Work::over(5 * x.shape().elements() as u64, &[x, residual, residual, weight, &out]));
        let (x, weight) = (x.view(), weight.view());
        self.backend.add_rms_norm(Call { x, residual: residual.view(), weight, epsilon, out: out.view() })?;
        Ok(out)
    }
}
