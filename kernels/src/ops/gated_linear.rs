//! The first half of a gated MLP: one product with the gate and up weights, then the gate (SwiGLU, Shazeer 2020,
//! arXiv 2002.05202).

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `out = silu(gate) * up` where `[gate | up] = x @ weight^T + bias`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, in_features]` activations; a gap between rows is allowed.
    pub x: Tensor<'a>,
    /// `[2 * features, in_features]`, floating point, contiguous: gate, then up.
    pub weight: Tensor<'a>,
    /// `[2 * features]`, floating point.
    pub bias: Option<Tensor<'a>>,
    /// `[rows, 2 * features]` activations: space for the intermediate product. Its contents afterwards are undefined.
    pub gate_up: Tensor<'a>,
    /// Scratch declared with [`Target::linear_scratch`](crate::Target::linear_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// `[rows, features]` activations.
    pub out: Tensor<'a>,
}

const OP: &str = "gated_linear";

impl<B: Backend> Scope<'_, B> {
    /// SiLU of the first half of `x @ weight^T + bias` times the second half: `x` `[rows, in_features]`, `weight`
    /// `[2 * features, in_features]`, `bias` `[2 * features]`; returns `[rows, features]`.
    ///
    /// It is [`linear`](Scope::linear) and [`silu_mul`](Scope::silu_mul) in one. The intermediate product is taken from
    /// the workspace even if the backend does not need it, because a plan does not know what autotuning chose.
    pub fn gated_linear(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
    ) -> Result<Tensor<'_>, KernelError> {
        self.check_product(OP, x, weight, bias)?;
        check::holds(weight.rows().is_multiple_of(2), OP, "weight", weight, "an even number of rows")?;
        let (rows, in_features, features) = (x.rows(), weight.columns(), weight.rows() / 2);
        let out = self.empty([rows, features])?;
        let inner = self.scope();
        let gate_up = inner.empty([rows, 2 * features])?;
        let scratch = inner.take_scratch(self.target().linear_scratch(2 * features, in_features, weight.dtype()))?;
        let flops = rows * features * (4 * in_features + 5);
        let mut work = Work::over(flops as u64, &[x, weight, &out]);
        work.bytes += bias.map_or(Bytes(0), Tensor::bytes);
        self.count(work);
        self.backend.gated_linear(Call {
            x: x.view(),
            weight: weight.view(),
            bias: bias.map(Tensor::view),
            gate_up: gate_up.view(),
            scratch: scratch.view(),
            out: out.view(),
        })?;
        drop(inner);
        Ok(out)
    }
}
