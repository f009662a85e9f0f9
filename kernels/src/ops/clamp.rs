//! Clamps elements to a range.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Clamps the elements of `x` `[rows, columns]` to the range from the first to the second of
    /// `bounds` `[2]` f32. NaN stays NaN. `x` may have gaps between its rows.
    pub fn clamp(&self, x: &Tensor<'_>, bounds: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "clamp";
        check::activation(OP, "x", x, self.target().activation())?;
        check_bounds(OP, bounds)?;
        let out = self.empty([x.rows(), x.columns()])?;
        self.count(Work::over(2 * x.shape().elements() as u64, &[x, &out]));
        self.backend.clamp(calls::Clamp { x: Some(x.view()), bounds: bounds.view(), out: out.view() })?;
        Ok(out)
    }

    /// Like [`clamp`](Scope::clamp), in place.
    pub fn clamp_in_place(&self, x: &mut Tensor<'_>, bounds: &Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "clamp_in_place";
        check::activation(OP, "x", x, self.target().activation())?;
        check::writable(OP, "x", x);
        check_bounds(OP, bounds)?;
        self.count(Work::over(2 * x.shape().elements() as u64, &[x, x]));
        self.backend.clamp(calls::Clamp { x: None, bounds: bounds.view(), out: x.view() })
    }
}

fn check_bounds(op: &'static str, bounds: &Tensor<'_>) -> Result<(), KernelError> {
    check::f32(op, "bounds", bounds)?;
    check::shape(op, "bounds", bounds, [2])
}
