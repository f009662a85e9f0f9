//! The Gaussian error linear unit, exact or by one of two approximations (Hendrycks and
//! Gimpel 2016, arXiv 1606.08415).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// The definition: `x / 2 * (1 + erf(x / sqrt(2)))`.
    Erf,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`, elsewhere
    /// named `gelu_pytorch_tanh` or `gelu_new`.
    Tanh,
    /// `x / (1 + exp(-1.702 * x))`, elsewhere named `quick_gelu`.
    Quick,
}

#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, features]` activations, changed in place.
    pub x: Tensor<'a>,
    pub kind: Gelu,
}

impl<B: Backend> Scope<'_, B> {
    /// Applies GELU to `x` in place.
    pub fn gelu(&self, x: &mut Tensor<'_>, kind: Gelu) -> Result<(), KernelError> {
        check::activation("gelu", "x", x, self.target().activation())?;
        check::writable("gelu", "x", x);
        self.count(Work::over(8 * x.shape().elements() as u64, &[x, x]));
        self.backend.gelu(Call { x: x.view(), kind })
    }
}
