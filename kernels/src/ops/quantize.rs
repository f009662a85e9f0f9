//! Rounding activations to E4M3, where the operation that makes them cannot do it: what attention leaves, and what a
//! weight in FP8 meets unasked.

use crate::{ActivationFormat, Activations, Backend, KernelError, Quantization, Rounded, Scope, Tensor, Work};

use super::check;

/// Computes for each row and each of its groups `scale = largest magnitude / 448` in f32, never below the smallest
/// normal number, and `data = x / scale`, rounded to the nearest, ties to even, and at most 448 in size. What is no
/// number stays none, and counts for no scale.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, columns]` activations; a gap between rows is allowed.
    pub x: Tensor<'a>,
    /// `[rows, columns]` and its scales.
    pub out: Rounded<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Rounds the rows of `x` `[rows, columns]`.
    pub fn quantize(&self, x: &Tensor<'_>, quantization: Quantization) -> Result<Activations<'_>, KernelError> {
        check::activation("quantize", "x", x, self.target().activation())?;
        let out = self.empty_in(ActivationFormat::of(Some(quantization)), x.rows(), x.columns())?;
        self.round(x, &out)?;
        Ok(out)
    }

    /// As [`quantize`](Scope::quantize), into what was taken for it.
    pub(super) fn round(&self, x: &Tensor<'_>, out: &Activations<'_>) -> Result<(), KernelError> {
        let Some(out) = &out.rounded else { return Ok(()) };
        let mut work = Work::over(2 * x.shape().elements() as u64, &[x]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.quantize(Call { x: x.view(), out: out.view() })
    }
}
