//! The gate of a gated MLP (SwiGLU, Shazeer 2020, arXiv 2002.05202).

use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Multiplies the SiLU of the first half of each row of `gate_up` `[rows, 2 * features]` by the
    /// second half. Returns `[rows, features]`.
    pub fn silu_mul(&self, gate_up: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        Ok(self.silu_mul_as(gate_up, ActivationFormat::PLAIN)?.plain.expect("the plain format was requested"))
    }

    /// Like [`silu_mul`](Scope::silu_mul), but returns the result in `format`.
    pub fn silu_mul_as(&self, gate_up: &Tensor<'_>, format: ActivationFormat) -> Result<Activations<'_>, KernelError> {
        const OP: &str = "silu_mul";
        check::activation(OP, "gate_up", gate_up, self.target().activation())?;
        check::holds(gate_up.columns().is_multiple_of(2), OP, "gate_up", gate_up, "an even number of columns")?;
        let out = self.empty_in(format, gate_up.rows(), gate_up.columns() / 2)?;
        let mut work = Work::over(5 * (out.rows() * out.columns()) as u64, &[gate_up]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.silu_mul(calls::SiluMul { gate_up: gate_up.view(), out: out.view() })?;
        Ok(out)
    }
}
