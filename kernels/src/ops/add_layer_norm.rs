//! Residual addition followed by layer normalisation, in one pass over the row.

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `residual = residual + x`, rounded to activations, and then [`layer_norm`](super::layer_norm) of
/// `residual`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, hidden]` activations.
    pub x: Tensor<'a>,
    /// `[rows, hidden]` activations, changed in place.
    pub residual: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub bias: Tensor<'a>,
    /// Added to the variance.
    pub epsilon: f32,
    /// `[rows, hidden]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Adds `x` `[rows, hidden]` to `residual` `[rows, hidden]` in place and returns the sum normalised as by
    /// [`layer_norm`](Scope::layer_norm), `[rows, hidden]`.
    pub fn add_layer_norm(
        &self,
        x: &Tensor<'_>,
        residual: &mut Tensor<'_>,
        weight: &Tensor<'_>,
        bias: &Tensor<'_>,
        epsilon: f32,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "add_layer_norm";
        check::added(OP, x, residual, self.target())?;
        check::column_weight(OP, "weight", weight, x, self.target())?;
        check::column_weight(OP, "bias", bias, x, self.target())?;
        let out = self.empty(x.shape())?;
        self.count(Work::over(9 * x.shape().elements() as u64, &[x, residual, residual, weight, bias, &out]));
        let (x, residual, weight, bias) = (x.view(), residual.view(), weight.view(), bias.view());
        self.backend.add_layer_norm(Call { x, residual, weight, bias, epsilon, out: out.view() })?;
        Ok(out)
    }
}
