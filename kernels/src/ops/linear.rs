//! The GEMM of activations with a weight, for all projections.

use bursar_budgets::Bytes;

use crate::{Activations, Backend, KernelError, Scope, Tensor, Weight, Work, calls};

use super::check;

const OP: &str = "linear";

struct Operands<'a> {
    x: Activations<'a>,
    weight: Weight<'a>,
    bias: Option<&'a Tensor<'a>>,
}

impl<B: Backend> Scope<'_, B> {
    /// Computes `x @ weight^T + bias` for `x` `[rows, in_features]`, `weight`
    /// `[out_features, in_features]` and `bias` `[out_features]`. Returns `[rows, out_features]`.
    pub fn linear<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        bias: Option<&'a Tensor<'a>>,
    ) -> Result<Tensor<'_>, KernelError> {
        let operands = Operands { x: x.into(), weight: weight.into(), bias };
        self.check_product(OP, &operands.x, &operands.weight, bias)?;
        let out = self.empty([operands.x.rows(), operands.weight.rows()])?;
        self.launch(operands, false, &out)?;
        Ok(out)
    }

    /// Like [`linear`](Scope::linear), but writes to `out` `[rows, out_features]`, which belongs to
    /// an outer scope. `out` contains activations, or f32 for logits.
    pub fn linear_into<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        bias: Option<&'a Tensor<'a>>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let operands = Operands { x: x.into(), weight: weight.into(), bias };
        self.check_product(OP, &operands.x, &operands.weight, bias)?;
        check::activation_or_f32(OP, "out", out, self.target())?;
        check::writable(OP, "out", out);
        check::shape(OP, "out", out, [operands.x.rows(), operands.weight.rows()])?;
        self.launch(operands, false, out)
    }

    /// Adds `x @ weight^T + bias` to `sum` `[rows, out_features]`, as a layer adds
    /// to the residual stream.
    pub fn linear_add<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        weight: impl Into<Weight<'a>>,
        bias: Option<&'a Tensor<'a>>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let operands = Operands { x: x.into(), weight: weight.into(), bias };
        self.check_product(OP, &operands.x, &operands.weight, bias)?;
        check::activation(OP, "sum", sum, self.target().activation())?;
        check::writable(OP, "sum", sum);
        check::shape(OP, "sum", sum, [operands.x.rows(), operands.weight.rows()])?;
        self.launch(operands, true, sum)
    }

    /// Quantizes activations if the weight requires this, allocates scratch, counts the work and
    /// calls the backend. Arguments are already checked.
    fn launch(&self, operands: Operands<'_>, accumulate: bool, out: &Tensor<'_>) -> Result<(), KernelError> {
        let Operands { x, weight, bias } = operands;
        let (out_features, in_features) = (weight.rows(), weight.columns());
        let inner = self.scope();
        let quant_scratch = inner.quant_scratch_for(&x, &weight)?;
        let shape = [out_features, in_features];
        let scratch = inner.take_scratch(self.target().linear_scratch(shape, weight.dtype(), out.dtype()))?;
        let x = inner.wanted(&x, &weight, &quant_scratch)?;
        let mut work = Work::over(2 * (x.rows() * out_features * in_features) as u64, &[out]);
        work.bytes += x.bytes() + weight.bytes() + bias.map_or(Bytes(0), Tensor::bytes);
        work.bytes += if accumulate { out.bytes() } else { Bytes(0) };
        self.count_product(&x, work);
        self.backend.linear(calls::Linear {
            x: x.view(),
            weight: weight.view(),
            bias: bias.map(Tensor::view),
            accumulate,
            scratch: scratch.view(),
            out: out.view(),
        })
    }
}
