//! The second half of a mixture of gated MLPs: each expert's down weights, and the weighted sum of a row's experts,
//! added to the residual stream.

use super::{check, route::Routing};
use crate::{Activations, Backend, KernelError, Scope, Tensor, Weight, Work};

/// Computes `sum[row] = Σ weight of the choice * (x[place] @ weight[expert]^T)` over the choices of each row whose
/// experts are here, in the order of their ranks, so that the same row has the same bits whatever stands beside it. It is
/// added to what `sum` has if `accumulate` is set.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows * top, in_features]` activations in the format that the weight wants, and no other, in the routing's order of
    /// places.
    pub x: Activations<'a>,
    /// `[experts * out_features, in_features]`, contiguous.
    pub weight: Weight<'a>,
    /// Which experts each row has.
    pub routing: Routing<'a>,
    /// `[rows * top, out_features]` activations: space for each expert's product. Undefined afterwards.
    pub products: Tensor<'a>,
    /// Scratch declared with [`Target::experts_scratch`](crate::Target::experts_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// Add to the contents of `sum` instead of replacing them.
    pub accumulate: bool,
    /// `[rows, out_features]` activations; a gap between rows is allowed.
    pub sum: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Adds to `sum` `[rows, out_features]` what each row's experts make of `x` `[rows * top, in_features]`, as
    /// [`gated_experts`](Scope::gated_experts) has returned it; `weight` `[experts * out_features, in_features]`.
    ///
    /// Space for all products is taken from the workspace even if the backend does not need it, because a plan does
    /// not know what autotuning chose.
    pub fn add_experts<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.sum_of_experts((x.into(), weight.into()), routing, true, sum, |call| self.backend.add_experts(call))
    }

    /// As [`add_experts`](Scope::add_experts), into `sum` in place of its contents: what a rank has of a sum whose experts
    /// are shared out.
    ///
    /// # Errors
    /// As [`add_experts`](Scope::add_experts).
    pub fn experts_into<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.sum_of_experts((x.into(), weight.into()), routing, false, sum, |call| self.backend.add_experts(call))
    }

    /// Checks, takes room and counts the work; `launch` gets the call.
    pub(super) fn sum_of_experts(
        &self,
        (x, weight): (Activations<'_>, Weight<'_>),
        routing: &Routing<'_>,
        accumulate: bool,
        sum: &mut Tensor<'_>,
        launch: impl FnOnce(Call<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        const OP: &str = "add_experts";
        self.check_product(OP, &x, &weight, None)?;
        check::activation(OP, "sum", sum, self.target().activation())?;
        check::writable(OP, "sum", sum);
        let (choices, in_features, out_features) = (routing.rows() * routing.top, weight.columns(), sum.columns());
        let is_shared = weight.rows() == routing.held.count * out_features;
        check::holds(is_shared, OP, "weight", &weight.data, "as many rows for each expert as the sum has columns")?;
        check::holds(x.any().is_contiguous() && x.rows() == choices, OP, "x", x.any(), "a row for each choice")?;
        check::holds(sum.rows() == routing.rows(), OP, "sum", sum, "as many rows as were routed")?;
        let inner = self.scope();
        let room = inner.room_for(&x, &weight)?;
        let products = inner.empty([choices, out_features])?;
        let scratch = inner.take_scratch(self.target().experts_scratch(out_features, in_features, weight.dtype()))?;
        let flops = 2 * choices * out_features * (in_features + 1);
        let x = inner.wanted(&x, &weight, &room)?;
        let mut work = Work::over(flops as u64, &[sum, &routing.choices, &routing.weights]);
        work.bytes += if accumulate { sum.bytes() } else { bursar_budgets::Bytes::ZERO };
        work.bytes += x.bytes() + routing.weight_bytes(&weight);
        self.count_product(&x, work);
        launch(Call {
            x: x.view(),
            weight: weight.view(),
            routing: routing.view(),
            products: products.view(),
            scratch: scratch.view(),
            accumulate,
            sum: sum.view(),
        })
    }
}
