//! The gated MLP: `down(silu(gate(x)) * up(x))`, added to the residual stream.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

use crate::weights::Linear;

/// Gate and up are one matrix, so that one product serves both.
pub struct GatedMlp {
    /// `[2 * intermediate, hidden]`: gate, then up.
    pub gate_up: Linear,
    /// `[hidden, intermediate]`
    pub down: Linear,
}

impl GatedMlp {
    /// Adds the MLP of `normed` `[rows, hidden]` to `hidden` `[rows, hidden]`.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        normed: &Tensor<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let activated = self.gate_up.forward_gated(&scope, normed)?; // [rows, intermediate]
        self.down.forward_add(&scope, &activated, hidden)
    }
}
