//! Sigmoid gates for attention outputs (Qiu et al. 2025, arXiv 2505.06708) and for shared experts.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Multiplies `x` `[rows, columns]` by the sigmoid of `gate`, in place. `gate` is
    /// `[rows, columns]`, or `[rows, 1]` with one gate for each row.
    pub fn sigmoid_mul(&self, x: &mut Tensor<'_>, gate: &Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "sigmoid_mul";
        check::activation(OP, "x", x, self.target().activation())?;
        check::activation(OP, "gate", gate, self.target().activation())?;
        check::writable(OP, "x", x);
        let columns = if gate.columns() == 1 { 1 } else { x.columns() };
        check::shape(OP, "gate", gate, [x.rows(), columns])?;
        self.count(Work::over(4 * x.shape().elements() as u64, &[x, x, gate]));
        self.backend.sigmoid_mul(calls::SigmoidMul { x: x.view(), gate: gate.view() })
    }
}
