//! The first half of a mixture of gated MLPs: each row's experts multiply it by their gate and up weights, and apply
//! the gate (SwiGLU, Shazeer 2020, arXiv 2002.05202).

use super::{check, route::Routing};
use crate::{Backend, KernelError, Scope, Tensor, Work};

/// Computes `out[place] = silu(gate) * up`, where `[gate | up] = x[row] @ weight[expert]^T` for the row and the expert
/// of the choice at `place`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, in_features]` activations; a gap between rows is allowed.
    pub x: Tensor<'a>,
    /// `[experts * 2 * features, in_features]`, floating point, contiguous: of each expert gate, then up.
    pub weight: Tensor<'a>,
    /// Which experts each row has.
    pub routing: Routing<'a>,
    /// Scratch declared with [`Target::experts_scratch`](crate::Target::experts_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// `[rows * top, features]` activations, in the routing's order of places.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// What each expert's gate and up weights make of the rows of `x` `[rows, in_features]` that chose it; `weight`
    /// `[experts * 2 * features, in_features]`. Returns `[rows * top, features]`, sorted by expert.
    pub fn gated_experts(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        routing: &Routing<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "gated_experts";
        self.check_product(OP, x, weight, None)?;
        let is_paired = weight.rows().is_multiple_of(2 * routing.experts());
        check::holds(is_paired, OP, "weight", weight, "as many rows of gate and of up for each expert")?;
        check::holds(x.rows() == routing.rows(), OP, "x", x, "as many rows as were routed")?;
        let (in_features, features) = (weight.columns(), weight.rows() / routing.experts() / 2);
        let choices = routing.rows() * routing.top;
        let out = self.empty([choices, features])?;
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().experts_scratch(2 * features, in_features, weight.dtype()))?;
        let mut work = Work::over((choices * features * (4 * in_features + 5)) as u64, &[x, &out, &routing.choices]);
        work.bytes += routing.weight_bytes(weight);
        self.count(work);
        self.backend.gated_experts(Call {
            x: x.view(),
            weight: weight.view(),
            routing: routing.view(),
            scratch: scratch.view(),
            out: out.view(),
        })?;
        drop(inner);
        Ok(out)
    }
}
