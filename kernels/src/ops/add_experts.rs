//! The second half of a mixture of gated MLPs: the GEMMs with the experts' down weights, and each
//! row's weighted sum over its experts, added to the residual stream.

use super::{check, route::Routing};
use crate::{Activations, Backend, KernelError, Scope, Tensor, Weight, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Multiplies `x` `[rows * top, in_features]`, as returned by
    /// [`gated_experts`](Scope::gated_experts), by `weight`
    /// `[experts * out_features, in_features]`, and adds each row's weighted sum over its
    /// experts to `sum` `[rows, out_features]`.
    ///
    /// Space for the GEMM results of all choices is taken from the workspace even if the backend
    /// does not need it, because a plan does not know which algorithm autotuning will choose.
    pub fn add_experts<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.sum_of_experts((x.into(), weight.into()), routing, true, sum, |call| self.backend.add_experts(call))
    }

    /// Like [`add_experts`](Scope::add_experts), but replaces the contents of `sum`. The result is
    /// a rank's partial sum if the experts are divided among ranks.
    ///
    /// # Errors
    /// The errors of [`add_experts`](Scope::add_experts).
    pub fn experts_into<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        routing: &Routing<'_>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.sum_of_experts((x.into(), weight.into()), routing, false, sum, |call| self.backend.add_experts(call))
    }

    /// Checks the arguments, allocates space from the workspace, counts the work, and passes
    /// the call to `launch`.
    pub(super) fn sum_of_experts(
        &self,
        (x, weight): (Activations<'_>, Weight<'_>),
        routing: &Routing<'_>,
        accumulate: bool,
        sum: &mut Tensor<'_>,
        launch: impl FnOnce(calls::AddExperts<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        const OP: &str = "add_experts";
        self.check_product(OP, &x, &weight, None)?;
        check::activation(OP, "sum", sum, self.target().activation())?;
        check::writable(OP, "sum", sum);
        let (choices, in_features, out_features) = (routing.rows() * routing.top, weight.columns(), sum.columns());
        let is_shared = weight.rows() == routing.held.count * out_features;
        check::holds(is_shared, OP, "weight", &weight.data, "one row per expert and column of sum")?;
        check::holds(x.any().is_contiguous() && x.rows() == choices, OP, "x", x.any(), "a row for each choice")?;
        check::holds(sum.rows() == routing.rows(), OP, "sum", sum, "as many rows as were routed")?;
        let inner = self.scope();
        let quant_scratch = inner.quant_scratch_for(&x, &weight)?;
        let products = inner.empty([choices, out_features])?;
        let scratch = inner.take_scratch(self.target().experts_scratch(out_features, in_features, weight.dtype()))?;
        let flops = 2 * choices * out_features * (in_features + 1);
        let x = inner.wanted(&x, &weight, &quant_scratch)?;
        let mut work = Work::over(flops as u64, &[sum, &routing.choices, &routing.weights]);
        work.bytes += if accumulate { sum.bytes() } else { bursar_budgets::Bytes::ZERO };
        work.bytes += x.bytes() + routing.weight_bytes(&weight);
        self.count_product(&x, work);
        launch(calls::AddExperts {
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
