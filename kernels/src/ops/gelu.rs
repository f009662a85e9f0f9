//! The Gaussian error linear unit, exact or by one of two approximations (Hendrycks and
//! Gimpel 2016, arXiv 1606.08415).

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

pub use crate::calls::Gelu;

impl<B: Backend> Scope<'_, B> {
    /// Applies GELU to `x` in place.
    pub fn gelu(&self, x: &mut Tensor<'_>, kind: Gelu) -> Result<(), KernelError> {
        check::activation("gelu", "x", x, self.target().activation())?;
        check::writable("gelu", "x", x);
        self.count(Work::over(8 * x.shape().elements() as u64, &[x, x]));
        self.backend.gelu(calls::ApplyGelu { x: x.view(), kind })
    }
}
