//! Quantization of activations, for activations that were not quantized by the operation
//! that computed them: the output of attention, and unquantized activations that are multiplied
//! by a quantized weight.

use crate::{ActivationFormat, Activations, Backend, KernelError, Quantization, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Quantizes the rows of `x` `[rows, columns]`.
    pub fn quantize(&self, x: &Tensor<'_>, quantization: Quantization) -> Result<Activations<'_>, KernelError> {
        check::activation("quantize", "x", x, self.target().activation())?;
        let out = self.empty_in(ActivationFormat::of(Some(quantization)), x.rows(), x.columns())?;
        self.round(x, &out)?;
        Ok(out)
    }

    /// Like [`quantize`](Scope::quantize), but writes to `out`, which was allocated for the result.
    /// Does nothing if `out` has no quantized format.
    pub(super) fn round(&self, x: &Tensor<'_>, out: &Activations<'_>) -> Result<(), KernelError> {
        let Some(out) = &out.quantized else { return Ok(()) };
        let mut work = Work::over(2 * x.shape().elements() as u64, &[x]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.quantize(calls::Quantize { x: x.view(), out: out.view() })
    }
}
