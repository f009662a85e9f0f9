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
        self.backend.gate_mul(calls::GateMul::of(gate_up, activation, out.view()))?;
        Ok(out)
    }

    /// Multiplies the `activation` of each element of `gate` `[rows, features]` by the element of
    /// `up` `[rows, features]`. Returns `[rows, features]`. `gate` and `up` may have gaps between
    /// their rows.
    pub fn gate_mul(
        &self,
        gate: &Tensor<'_>,
        up: &Tensor<'_>,
        activation: GateActivation,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "gate_mul";
        check::activation(OP, "gate", gate, self.target().activation())?;
        check::activation(OP, "up", up, self.target().activation())?;
        check::shape(OP, "up", up, gate.shape())?;
        let out = self.empty([gate.rows(), gate.columns()])?;
        self.count(Work::over(activation.flops() * (out.rows() * out.columns()) as u64, &[gate, up, &out]));
        let (gate, up, out_of) = (gate.view(), up.view(), Activations::of_plain(out.view()));
        self.backend.gate_mul(calls::GateMul { gate, up, activation, out: out_of })?;
        Ok(out)
    }
}

impl<'a> calls::GateMul<'a> {
    /// The call for `gate_up` `[rows, 2 * features]`: gate, then up.
    pub(crate) fn of(gate_up: &'a Tensor<'_>, activation: GateActivation, out: Activations<'a>) -> Self {
        let features = gate_up.columns() / 2;
        let (gate, up) = (gate_up.column_range(0..features), gate_up.column_range(features..2 * features));
        calls::GateMul { gate, up, activation, out }
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
