//! The sum of a tensor over the ranks of a model that is split across devices.

use crate::{Backend, KernelError, Scope, Tensor};

use super::check;

/// What a backend is asked to compute: every rank's `x` becomes the sum of all ranks' `x`. At one rank there is
/// nothing to do.
#[non_exhaustive]
pub struct Call<'a> {
    /// Activations, changed in place.
    pub x: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Sums `x` over all ranks, in place. A residual stream is reduced after a split projection was added to it: on
    /// every rank but the first, [`linear_add`](Scope::linear_add) then starts from zero, so that the stream itself
    /// is counted once.
    pub fn all_reduce(&self, x: &mut Tensor<'_>) -> Result<(), KernelError> {
        check::activation("all_reduce", "x", x, self.target().activation())?;
        check::writable("all_reduce", "x", x);
        self.backend.all_reduce(Call { x: x.view() })
    }
}
