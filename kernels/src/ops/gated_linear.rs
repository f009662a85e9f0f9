//! The first half of a gated MLP: one GEMM with the gate and up weights, then the gate (SwiGLU
//! and GeGLU, Shazeer 2020, arXiv 2002.05202).

use bursar_budgets::Bytes;

use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Weight, Work, calls};

use super::{check, gate_mul::GateActivation};

const OP: &str = "gated_linear";

impl<B: Backend> Scope<'_, B> {
    /// Computes `x @ weight^T + bias`, and multiplies the SiLU of the first half of the columns by
    /// the second half. `x` is `[rows, in_features]`, `weight` is `[2 * features, in_features]` and
    /// `bias` is `[2 * features]`. Returns `[rows, features]`.
    ///
    /// This method combines [`linear`](Scope::linear) and [`silu_mul`](Scope::silu_mul). Space for
    /// the result before the gate is taken from the workspace even if the backend does not need it,
    /// because a plan does not know which algorithm autotuning will choose.
    pub fn gated_linear<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        bias: Option<&'a Tensor<'a>>,
    ) -> Result<Tensor<'_>, KernelError> {
        let out = self.gated_linear_as(x, weight, bias, GateActivation::Silu, ActivationFormat::PLAIN)?;
        Ok(out.plain.expect("the plain format was requested"))
    }

    /// Like [`gated_linear`](Scope::gated_linear), with `activation` in place of SiLU, and with the
    /// result in `format`.
    pub fn gated_linear_as<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        bias: Option<&'a Tensor<'a>>,
        activation: GateActivation,
        format: ActivationFormat,
    ) -> Result<Activations<'_>, KernelError> {
        let (x, weight) = (x.into(), weight.into());
        self.check_product(OP, &x, &weight, bias)?;
        check::holds(weight.rows().is_multiple_of(2), OP, "weight", &weight.data, "an even number of rows")?;
        let (rows, in_features, features) = (x.rows(), weight.columns(), weight.rows() / 2);
        let out = self.empty_in(format, rows, features)?;
        let inner = self.scope();
        let quant_scratch = inner.quant_scratch_for(&x, &weight)?;
        let gate_up = inner.empty([rows, 2 * features])?;
        let scratch = inner.take_scratch(self.target().linear_scratch(
            [2 * features, in_features],
            weight.dtype(),
            gate_up.dtype(),
        ))?;
        let x = inner.wanted(&x, &weight, &quant_scratch)?;
        let flops = (rows * features) as u64 * (4 * in_features as u64 + activation.flops());
        let bias_bytes = bias.map_or(Bytes(0), Tensor::bytes);
        let bytes = x.bytes() + weight.bytes() + out.bytes() + bias_bytes;
        self.count_product(&x, Work { flops, bytes, ..Work::default() });
        self.backend.gated_linear(calls::GatedLinear {
            x: x.view(),
            weight: weight.view(),
            bias: bias.map(Tensor::view),
            activation,
            gate_up: gate_up.view(),
            scratch: scratch.view(),
            out: out.view(),
        })?;
        drop(inner);
        Ok(out)
    }
}
