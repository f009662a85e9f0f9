//! The gate of a gated MLP (SwiGLU and GeGLU, Shazeer 2020, arXiv 2002.05202).

use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

pub use crate::calls::GateActivation;

impl<B: Backend> Scope<'_, B> {
    /// Multiplies the SiLU of the first half of each row of `gate_up` `[rows, 2 * features]` by the
    /// second half. Returns `[rows, features]`.
    pub fn silu_mul(&self, gate_up: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        let out = self.gate_mul_as(gate_up, GateActivation::Silu, ActivationFormat::PLAIN)?;
        Ok(out.plain.expect("the plain format was requested"))
    }

    /// Multiplies the `activation` of the first half of each row of `gate_up`
    /// `[rows, 2 * features]` by the second half. Returns `[rows, features]` in `format`.
    pub fn gate_mul_as(
        &self,
        gate_up: &Tensor<'_>,
        activation: GateActivation,
        format: ActivationFormat,
    ) -> Result<Activations<'_>, KernelError> {
        const OP: &str = "gate_mul";
        check::activation(OP, "gate_up", gate_up, self.target().activation())?;
        check::holds(gate_up.columns().is_multiple_of(2), OP, "gate_up", gate_up, "an even number of columns")?;
        let out = self.empty_in(format, gate_up.rows(), gate_up.columns() / 2)?;
        let mut work = Work::over(activation.flops() * (out.rows() * out.columns()) as u64, &[gate_up]);
        work.bytes += out.bytes();
        self.count(work);
        self.backend.gate_mul(calls::GateMul { gate_up: gate_up.view(), activation, out: out.view() })?;
        Ok(out)
    }
}

impl GateActivation {
    /// Floating-point operations of one gate and its product.
    pub(super) fn flops(self) -> u64 {
        match self {
            GateActivation::Silu => 5,
            GateActivation::GeluTanh => 9,
        }
    }
}
