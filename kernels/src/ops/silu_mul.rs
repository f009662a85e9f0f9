//! The gate of a gated MLP (SwiGLU, Shazeer 2020, arXiv 2002.05202).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `out = gate / (1 + exp(-gate)) * up`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, 2 * features]` activations: gate, then up.
    pub gate_up: Tensor<'a>,
    /// `[rows, features]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// SiLU of the first half of each row of `gate_up` `[rows, 2 * features]` times the second half; returns
    /// `[rows, features]`.
    pub fn silu_mul(&self, gate_up: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "silu_mul";
        check::activation(OP, "gate_up", gate_up, self.target().activation())?;
        check::holds(gate_up.columns().is_multiple_of(2), OP, "gate_up", gate_up, "an even number of columns")?;
        let out = self.empty([gate_up.rows(), gate_up.columns() / 2])?;
        self.count(Work::over(5 * out.shape().elements() as u64, &[gate_up, &out]));
        self.backend.silu_mul(Call { gate_up: gate_up.view(), out: out.view() })?;
        Ok(out)
    }
}
