//! The norm of each head's output in a gated delta net, multiplied by the SiLU of a gate.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Normalizes each head of `x` `[rows, heads * head_dim]` by its root mean square, scales it by
    /// `weight` `[head_dim]` f32, and multiplies it by the SiLU of `gate`
    /// `[rows, heads * head_dim]`. Returns `[rows, heads * head_dim]`.
    pub fn gated_rms_norm(
        &self,
        x: &Tensor<'_>,
        gate: &Tensor<'_>,
        weight: &Tensor<'_>,
        epsilon: f32,
    ) -> Result<Tensor<'_>, KernelError> {
        let mut out = self.empty([x.rows(), x.columns()])?;
        self.gated_rms_norm_into(x, gate, weight, epsilon, &mut out)?;
        Ok(out)
    }

    /// Like [`gated_rms_norm`](Scope::gated_rms_norm), but writes to `out`
    /// `[rows, heads * head_dim]`, whose rows must be contiguous.
    pub fn gated_rms_norm_into(
        &self,
        x: &Tensor<'_>,
        gate: &Tensor<'_>,
        weight: &Tensor<'_>,
        epsilon: f32,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "gated_rms_norm";
        let head_dim = weight.rows();
        check::activation(OP, "x", x, self.target().activation())?;
        check::activation(OP, "gate", gate, self.target().activation())?;
        check::shape(OP, "gate", gate, x.shape())?;
        check::f32(OP, "weight", weight)?;
        check::shape(OP, "weight", weight, [head_dim])?;
        check::holds(head_dim > 0 && x.columns().is_multiple_of(head_dim), OP, "x", x, "whole heads")?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::shape(OP, "out", out, x.shape())?;
        check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
        check::writable(OP, "out", out);
        self.count(Work::over(9 * x.shape().elements() as u64, &[x, gate, weight, out]));
        self.backend.gated_rms_norm(calls::GatedRmsNorm {
            x: x.view(),
            gate: gate.view(),
            weight: weight.view(),
            epsilon,
            out: out.view(),
        })
    }
}
