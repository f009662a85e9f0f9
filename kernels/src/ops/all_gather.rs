//! All-gather: the concatenated columns of all ranks, on each rank. This collective combines the
//! logits of an output projection whose rows are divided among the ranks.

use super::check;
use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Writes all ranks' `part` `[rows, columns]` side by side to `out` `[rows, ranks * columns]`,
    /// in the order of the ranks' indices. Both tensors contain activations, or f32 such as logits.
    ///
    /// # Errors
    /// The shapes disagree, or the device is lost because a rank did not join in time.
    pub fn all_gather_into(&self, part: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "all_gather";
        check::activation_or_f32(OP, "part", part, self.target())?;
        check::activation(OP, "out", out, part.dtype())?;
        check::writable(OP, "out", out);
        check::shape(OP, "out", out, [part.rows(), self.rank().of() * part.columns()])?;
        self.count(Work::over(0, &[part, out]));
        self.backend.all_gather(calls::AllGather { part: part.view(), out: out.view() })
    }
}
