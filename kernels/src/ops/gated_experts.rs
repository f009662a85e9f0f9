//! The first half of a mixture of gated MLPs: each row is multiplied by the gate and up weights of
//! its experts, and the gate is applied (SwiGLU, Shazeer 2020, arXiv 2002.05202).

use bursar_budgets::Bytes;

use super::{check, gate_mul::GateActivation, route::Routing};
use crate::{ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Weight, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Multiplies the rows of `x` `[rows, in_features]` by the gate and up weights of the experts
    /// that they chose, and applies the SiLU gate. `weight` is `[experts * 2 * features, in_features]`.
    /// Returns `[rows * top, features]`, sorted by expert. The rows of experts that this rank does
    /// not hold are undefined.
    pub fn gated_experts<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        Ok(self
            .gated_experts_as(x, weight, routing, GateActivation::Silu, ActivationFormat::PLAIN)?
            .plain
            .expect("the plain format was requested"))
    }

    /// Like [`gated_experts`](Scope::gated_experts), but with any gate activation and output format.
    pub fn gated_experts_as<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
        activation: GateActivation,
        format: ActivationFormat,
    ) -> Result<Activations<'_>, KernelError> {
        const OP: &str = "gated_experts";
        let (x, weight) = (x.into(), weight.into());
        self.check_product(OP, &x, &weight, None)?;
        let is_paired = weight.rows().is_multiple_of(2 * routing.held.count);
        check::holds(is_paired, OP, "weight", &weight.data, "equally many gate and up rows for each expert")?;
        check::holds(x.rows() == routing.rows(), OP, "x", x.any(), "as many rows as were routed")?;
        let (in_features, features) = (weight.columns(), weight.rows() / routing.held.count / 2);
        let choices = routing.rows() * routing.top;
        let out = self.empty_in(format, choices, features)?;
        let inner = self.scope();
        let quant_scratch = inner.quant_scratch_for(&x, &weight)?;
        let gated =
            if format.is_unquantized { Bytes::ZERO } else { self.target().gated_rows_scratch(choices, features) };
        let gated = inner.take_scratch(gated)?;
        let scratch = inner.take_scratch(self.target().experts_scratch(2 * features, in_features, weight.dtype()))?;
        let x = inner.wanted(&x, &weight, &quant_scratch)?;
        let mut work = Work::over(
            choices as u64 * features as u64 * (4 * in_features as u64 + activation.flops()),
            &[&routing.choices],
        );
        work.bytes += x.bytes() + out.bytes() + routing.weight_bytes(&weight);
        self.count_product(&x, work);
        self.backend.gated_experts(calls::GatedExperts {
            x: x.view(),
            weight: weight.view(),
            routing: routing.view(),
            activation,
            scratch: scratch.view(),
            gated: gated.view(),
            out: out.view(),
        })?;
        drop(inner);
        Ok(out)
    }
}
