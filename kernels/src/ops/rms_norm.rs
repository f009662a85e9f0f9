//! Root-mean-square normalization (Zhang and Sennrich, 2019, arXiv 1910.07467).

use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Target, Tensor, Work, calls};

use super::check;

#[derive(Clone, Copy)]
pub struct RmsNorm<'a> {
    /// `[hidden]`, floating point.
    pub weight: &'a Tensor<'a>,
    /// Constant added to the mean square.
    pub epsilon: f32,
}

impl RmsNorm<'_> {
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
        let Some(rounded) = &out.rounded else { return Ok(()) };
        check::shape(op, "out", &rounded.data, x.shape())?;
        check::shape(op, "scales of out", &rounded.scales, [x.rows(), rounded.quantization.row_scales(x.columns())])?;
        check::writable(op, "out", &rounded.data);
        Ok(())
    }
}

impl<B: Backend> Scope<'_, B> {
    /// Normalizes the rows of `x` `[rows, hidden]` and scales them by
    /// `weight` `[hidden]`. Returns `[rows, hidden]`.
    pub fn rms_norm(&self, x: &Tensor<'_>, weight: &Tensor<'_>, epsilon: f32) -> Result<Tensor<'_>, KernelError> {
        Ok(self.rms_norm_as(x, weight, epsilon, ActivationFormat::PLAIN)?.plain.expect("it was asked for"))
    }

    /// Like [`rms_norm`](Scope::rms_norm), but returns the result in `format`.
    pub fn rms_norm_as(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        epsilon: f32,
        format: ActivationFormat,
    ) -> Result<Activations<'_>, KernelError> {
        let mut out = self.empty_in(format, x.rows(), x.columns())?;
        self.rms_norm_into(x, RmsNorm { weight, epsilon }, &mut out)?;
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
        let RmsNorm { weight, epsilon } = norm;
        let mut work = Work::over(4 * x.shape().elements() as u64, &[x, weight]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.rms_norm(calls::RmsNorm { x: x.view(), weight: weight.view(), epsilon, out: out.view() })
    }
}
