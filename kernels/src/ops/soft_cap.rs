//! Logit softcapping (Gemma 2, arXiv 2408.00118).

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Replaces each element of `x` `[rows, columns]` f32 by `cap * tanh(x / cap)`. `cap` is greater
    /// than 0. `x` may have gaps between its rows.
    pub fn soft_cap(&self, x: &mut Tensor<'_>, cap: f32) -> Result<(), KernelError> {
        const OP: &str = "soft_cap";
        check::f32(OP, "x", x)?;
        check::writable(OP, "x", x);
        self.count(Work::over(4 * x.shape().elements() as u64, &[x, x]));
        self.backend.soft_cap(calls::SoftCap { x: x.view(), cap })
    }
}
