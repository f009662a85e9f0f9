//! Root-mean-square normalization (Zhang and Sennrich, 2019, arXiv 1910.07467).

use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Target, Tensor, Work, calls};

use super::check;

#[derive(Clone, Copy)]
pub struct RmsNorm<'a> {
    /// `[hidden]`, floating point.
    pub weight: &'a Tensor<'a>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
}

impl<'a> RmsNorm<'a> {
    /// A norm whose output is multiplied by `weight` `[hidden]` as it is stored.
    pub fn new(weight: &'a Tensor<'a>, epsilon: f32) -> Self {
        RmsNorm { weight, weight_offset: 0.0, epsilon }
    }

    /// The operands of the call that normalizes `x` into `out`.
    pub(super) fn call<'c>(&'c self, x: &'c Tensor<'_>, out: &'c Activations<'_>) -> calls::RmsNorm<'c> {
        let (weight, weight_offset) = (self.weight.view(), self.weight_offset);
        calls::RmsNorm { x: x.view(), weight, weight_offset, epsilon: self.epsilon, out: out.view() }
    }

    /// Checks that the weight fits the rows of `x`, and that `out` has the shape of
    /// `x` and is writable.
    pub(super) fn check(
        &self,
        op: &'static str,
        x: &Tensor<'_>,
        out: &Activations<'_>,
        target: &Target,
    ) -> Result<(), KernelError> {
        check::activation(op, "x", x, target.activation())?;
        check::column_weight(op, "weight", self.weight, x, target)?;
        if let Some(plain) = &out.plain {
            check::activation(op, "out", plain, target.activation())?;
            check::shape(op, "out", plain, x.shape())?;
            check::writable(op, "out", plain);
        }
        let Some(quantized) = &out.quantized else { return Ok(()) };
        check::shape(op, "out", &quantized.data, x.shape())?;
        check::shape(
            op,
            "scales of out",
            &quantized.scales,
            [x.rows(), quantized.quantization.row_scales(x.columns())],
        )?;
        check::writable(op, "out", &quantized.data);
        Ok(())
    }
}

impl<B: Backend> Scope<'_, B> {
    /// Normalizes the rows of `x` `[rows, hidden]` and scales them by the weight of `norm`. Returns
    /// `[rows, hidden]`.
    pub fn rms_norm(&self, x: &Tensor<'_>, norm: RmsNorm<'_>) -> Result<Tensor<'_>, KernelError> {
        Ok(self.rms_norm_as(x, norm, ActivationFormat::PLAIN)?.plain.expect("the plain format was requested"))
    }

    /// Like [`rms_norm`](Scope::rms_norm), but returns the result in `format`.
    pub fn rms_norm_as(
        &self,
        x: &Tensor<'_>,
        norm: RmsNorm<'_>,
        format: ActivationFormat,
    ) -> Result<Activations<'_>, KernelError> {
        let mut out = self.empty_in(format, x.rows(), x.columns())?;
        self.rms_norm_into(x, norm, &mut out)?;
        Ok(out)
    }

    /// Like [`rms_norm`](Scope::rms_norm), but writes to `out` `[rows, hidden]` in the
    /// formats that `out` has.
    pub fn rms_norm_into(
        &self,
        x: &Tensor<'_>,
        norm: RmsNorm<'_>,
        out: &mut Activations<'_>,
    ) -> Result<(), KernelError> {
        norm.check("rms_norm", x, out, self.target())?;
        let mut work = Work::over(4 * x.shape().elements() as u64, &[x, norm.weight]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.rms_norm(norm.call(x, out))
    }
}
