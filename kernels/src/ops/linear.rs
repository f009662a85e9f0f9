//! The matrix product with a weight, as every projection uses it.

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `out = x @ weight^T + bias`, or adds it to `out` if `accumulate` is set. Sums are in `f32`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, in_features]` activations; a gap between rows is allowed.
    pub x: Tensor<'a>,
    /// `[out_features, in_features]`, floating point, contiguous.
    pub weight: Tensor<'a>,
    /// `[out_features]`, floating point.
    pub bias: Option<Tensor<'a>>,
    /// Add to the contents of `out` instead of replacing them.
    pub accumulate: bool,
    /// Scratch declared with [`Target::linear_scratch`](crate::Target::linear_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// `[rows, out_features]` activations; f32 is allowed too unless `accumulate` is set.
    pub out: Tensor<'a>,
}

const OP: &str = "linear";

impl<B: Backend> Scope<'_, B> {
    /// `x @ weight^T + bias`: `x` `[rows, in_features]`, `weight` `[out_features, in_features]`, `bias`
    /// `[out_features]`; returns `[rows, out_features]`.
    pub fn linear(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
    ) -> Result<Tensor<'_>, KernelError> {
        self.check_product(OP, x, weight, bias)?;
        let out = self.empty([x.rows(), weight.rows()])?;
        self.launch(x, weight, bias, false, &out)?;
        Ok(out)
    }

    /// As [`linear`](Scope::linear), into `out` `[rows, out_features]` of an outer scope. `out` holds activations, or
    /// f32 for logits.
    pub fn linear_into(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.check_product(OP, x, weight, bias)?;
        check::activation_or_f32(OP, "out", out, self.target())?;
        check::writable(OP, "out", out);
        check::shape(OP, "out", out, [x.rows(), weight.rows()])?;
        self.launch(x, weight, bias, false, out)
    }

    /// Adds `x @ weight^T + bias` to `sum` `[rows, out_features]`, as a layer adds to the residual stream.
    pub fn linear_add(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.check_product(OP, x, weight, bias)?;
        check::activation(OP, "sum", sum, self.target().activation())?;
        check::writable(OP, "sum", sum);
        check::shape(OP, "sum", sum, [x.rows(), weight.rows()])?;
        self.launch(x, weight, bias, true, sum)
    }

    /// The checks that all products share.
    pub(super) fn check_product(
        &self,
        op: &'static str,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
    ) -> Result<(), KernelError> {
        check::activation(op, "x", x, self.target().activation())?;
        check::weight(op, "weight", weight, self.target())?;
        check::holds(weight.is_contiguous() && weight.columns() > 0, op, "weight", weight, "contiguous rows")?;
        check::shape(op, "x", x, [x.rows(), weight.columns()])?;
        let Some(bias) = bias else { return Ok(()) };
        check::weight(op, "bias", bias, self.target())?;
        check::shape(op, "bias", bias, [weight.rows()])
    }

    /// Takes scratch, counts the work and calls the backend; arguments are already checked.
    fn launch(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
        accumulate: bool,
        out: &Tensor<'_>,
    ) -> Result<(), KernelError> {
        let (out_features, in_features) = (weight.rows(), weight.columns());
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().linear_scratch(out_features, in_features, weight.dtype()))?;
        let mut work = Work::over(2 * (x.rows() * out_features * in_features) as u64, &[x, weight, out]);
        work.bytes += bias.map_or(Bytes(0), Tensor::bytes) + if accumulate { out.bytes() } else { Bytes(0) };
        self.count(work);
        self.backend.linear(Call {
            x: x.view(),
            weight: weight.view(),
            bias: bias.map(Tensor::view),
            accumulate,
            scratch: scratch.view(),
            out: out.view(),
        })
    }
}
