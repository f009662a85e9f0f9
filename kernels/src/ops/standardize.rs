//! Standardizes columns: `(x * factor - shift) * scale`, with `shift` and `scale` from the checkpoint.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Replaces each element of `x` `[rows, columns]` by `(x * factor - shift) * scale`, with `shift`
    /// and `scale` `[columns]` f32. Arithmetic is f32, so `x * factor` may exceed the range of
    /// activations. `x` may have gaps between its rows.
    pub fn standardize(
        &self,
        x: &mut Tensor<'_>,
        factor: f32,
        shift: &Tensor<'_>,
        scale: &Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "standardize";
        check::activation(OP, "x", x, self.target().activation())?;
        check::writable(OP, "x", x);
        for (what, numbers) in [("shift", shift), ("scale", scale)] {
            check::f32(OP, what, numbers)?;
            check::shape(OP, what, numbers, [x.columns()])?;
        }
        self.count(Work::over(3 * x.shape().elements() as u64, &[x, x, shift, scale]));
        let (shift, scale) = (shift.view(), scale.view());
        self.backend.standardize(calls::Standardize { x: x.view(), factor, shift, scale })
    }
}
