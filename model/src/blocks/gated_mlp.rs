//! The gated MLP: `down(activation(gate(x)) * up(x))`, added to the residual stream.

use bursar_kernels::{
    ActivationFormat, Activations, Backend, KernelError, RankShard, Scope, Tensor, ops::gate_mul::GateActivation,
};

use crate::weights::{Linear, WeightError, WeightMap};

/// The weights of a gated MLP. Gate and up are one matrix, so that one GEMM computes both.
pub struct GatedMlp {
    /// `[2 * intermediate, hidden]`: gate, then up.
    pub gate_up: Linear,
    /// `[hidden, intermediate]`
    pub down: Linear,
    activation: GateActivation,
}

impl GatedMlp {
    /// Claims the weights of `gate`, `up` and `down`; see [`WeightMap::gated`].
    ///
    /// # Errors
    /// See [`WeightMap::gated`].
    pub fn claim(
        map: &mut WeightMap<'_>,
        projections: [&str; 3],
        widths: (usize, RankShard),
        bias: bool,
        activation: GateActivation,
    ) -> Result<Self, WeightError> {
        let [gate_up, down] = map.gated(projections, widths, bias)?;
        Ok(GatedMlp { gate_up, down, activation })
    }

    /// The activation format that the MLP reads directly, without quantizing the rows first.
    pub fn reads(&self) -> ActivationFormat {
        self.gate_up.reads()
    }

    /// Runs the MLP on `normed` `[rows, hidden]` and adds the result to `hidden` `[rows, hidden]`.
    pub fn forward<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        normed: impl Into<Activations<'a>>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let activated = self.gate(&scope, normed)?;
        self.down.forward_add(&scope, &activated, hidden)
    }

    /// The first half of the MLP. Returns the input of [`down`](GatedMlp::down),
    /// `[rows, intermediate]`.
    pub fn gate<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        normed: impl Into<Activations<'a>>,
    ) -> Result<Activations<'s>, KernelError> {
        self.gate_as(scope, normed, self.down.reads())
    }

    /// Like [`gate`](GatedMlp::gate), with the result in `format`.
    pub fn gate_as<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        normed: impl Into<Activations<'a>>,
        format: ActivationFormat,
    ) -> Result<Activations<'s>, KernelError> {
        self.gate_up.forward_gated(scope, normed, self.activation, format)
    }
}
