//! The Gaussian error linear unit, exact form (Hendrycks and Gimpel 2016, arXiv 1606.08415).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `x = x / 2 * (1 + erf(x / sqrt(2)))`, in place.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, features]` activations, changed in place.
    pub x: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Applies GELU to `x` in place.
    pub fn gelu(&self, x: &mut Tensor<'_>) -> Result<(), KernelError> {
        check::activation("gelu", "x", x, self.target().activation())?;
        check::writable("gelu", "x", x);
        self.count(Work::over(8 * x.shape().elements() as u64, &[x, x]));
        self.backend.gelu(Call { x: x.view() })
    }
}
