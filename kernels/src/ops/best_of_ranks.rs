//! The index of each row's largest element among the columns of all ranks, for greedy
//! decoding without gathering logits.

use super::{argmax, check};
use crate::{Backend, KernelError, RankShard, Scope, Tensor, Work};

/// For each row `i`, picks the largest of the elements that the ranks found in their own columns.
/// `out[i]` is the index of this element among the concatenated columns of all ranks. Among equal
/// elements, the lowest index wins. A rank whose columns have only NaN is ignored. If a row has
/// only NaN on all ranks, the result is [`NO_CHOICE`](argmax::NO_CHOICE). The rules for the order
/// of calls and for waiting are the same as for [`all_reduce`](super::all_reduce::Call).
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, columns]` f32: this rank's columns. A gap between rows is allowed.
    pub x: Tensor<'a>,
    /// Index of this rank's first column among the columns of all ranks.
    pub first: usize,
    /// `[rows]` u32: the [`argmax`](argmax::Call) of each row of `x`, which the result replaces.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Returns `true` if there are several ranks, and each rank needs only its
    /// own columns to choose.
    pub fn chooses_among_ranks(&self) -> bool {
        !self.rank().is_alone() && self.backend.chooses_among_ranks()
    }

    /// Writes the first index of the largest element in each row of all ranks' concatenated columns
    /// to `out` `[rows]` u32. If the ranks [choose](Scope::chooses_among_ranks) together, `x`
    /// `[rows, columns.count]` f32 has this rank's columns, and the ranks exchange 8 bytes per row.
    /// Otherwise `x` has the columns of all ranks.
    ///
    /// # Errors
    /// The shapes disagree, or the device is lost because a rank did not join in time.
    pub fn argmax_of_ranks_into(
        &self,
        x: &Tensor<'_>,
        columns: RankShard,
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
