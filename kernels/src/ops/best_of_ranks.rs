//! The index of each row's largest element among the columns of all ranks: greedy choice without gathering logits.

use super::{argmax, check};
use crate::{Backend, KernelError, Scope, Share, Tensor, Work};

/// Picks for each row `i` among what all ranks have found in their own columns: `out[i]` is the index, among the columns
/// of all ranks side by side, of the largest element, the first one of equals. A rank without a number takes no part, and
/// a row without any is [`NO_CHOICE`](argmax::NO_CHOICE). When ranks come and what it waits for is as for
/// [`all_reduce`](super::all_reduce::Call).
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, columns]` f32: what this rank has. A gap between rows is allowed.
    pub x: Tensor<'a>,
    /// Where its columns begin among those of all ranks.
    pub first: usize,
    /// `[rows]` u32: the [`argmax`](argmax::Call) of each row of `x`, which the outcome replaces.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Whether there are several ranks, each of which needs no more than its own columns to choose.
    pub fn chooses_among_ranks(&self) -> bool {
        !self.rank().is_alone() && self.backend.chooses_among_ranks()
    }

    /// The first index of the largest element in each row of all ranks' columns side by side, into `out` `[rows]` u32. `x`
    /// `[rows, columns.count]` f32 is what this rank has of them: all, if ranks do not [choose](Scope::chooses_among_ranks)
    /// together. Otherwise 8 bytes of a row cross from rank to rank.
    ///
    /// # Errors
    /// Shapes disagree; the device is lost, because a rank did not come.
    pub fn argmax_of_ranks_into(
        &self,
        x: &Tensor<'_>,
        columns: Share,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "argmax_of_ranks";
        check::f32(OP, "x", x)?;
        check::shape(OP, "x", x, [x.rows(), columns.count])?;
        check::indices(OP, "out", out)?;
        check::shape(OP, "out", out, [x.rows()])?;
        check::writable(OP, "out", out);
        self.count(Work::over(x.shape().elements() as u64, &[x, out]));
        self.backend.argmax(argmax::Call { x: x.view(), out: out.view() })?;
        if !self.chooses_among_ranks() {
            return Ok(());
        }
        self.backend.best_of_ranks(Call { x: x.view(), first: columns.first, out: out.view() })
    }
}
