//! The index of each row's largest element among the columns of all ranks, for greedy
//! decoding without gathering logits.

use super::check;
use crate::{Backend, KernelError, RankShard, Scope, Tensor, Work, calls};

impl<B: Backend> Scope<'_, B> {
    /// Returns `true` if there are several ranks, and each rank needs only its
    /// own columns to choose.
    pub fn chooses_among_ranks(&self) -> bool {
        !self.rank().is_alone() && self.backend.chooses_among_ranks()
    }

    /// Writes the first index of the largest element in each row of all ranks' concatenated columns
    /// to `out` `[rows]` u32, with the same rules for NaN as [`argmax`](Scope::argmax). If the
    /// ranks [choose](Scope::chooses_among_ranks) together, `x` `[rows, columns.count]` f32 has
    /// this rank's columns, and the ranks exchange 8 bytes per row. Otherwise `x` has the columns
    /// of all ranks.
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
        self.backend.argmax(calls::Argmax { x: x.view(), ids: None, out: out.view() })?;
        if !self.chooses_among_ranks() {
            return Ok(());
        }
        self.backend.best_of_ranks(calls::BestOfRanks { x: x.view(), first: columns.first, out: out.view() })
    }
}
