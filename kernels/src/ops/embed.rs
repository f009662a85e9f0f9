//! Embedding: one row of a table for each id.

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Set in an id that nobody on the host has seen: the rest of it is a row of the list that the step before has written
/// its choices to, and the id is what stands there.
pub const PREVIOUS: u32 = 1 << 31;

/// What a backend is asked to compute: `out[i] = table[ids[i]]`, widened or narrowed to activations. An id of
/// [`PREVIOUS`]` | row` stands for `previous[row]`; where that is [`NO_CHOICE`](super::argmax::NO_CHOICE), nothing was
/// chosen and the row is all zeros.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[vocabulary, hidden]`, floating point.
    pub table: Tensor<'a>,
    /// `[tokens]` u32, each below the vocabulary, or [`PREVIOUS`] with a row of `previous`.
    pub ids: Tensor<'a>,
    /// `[rows]` u32, each below the vocabulary or [`NO_CHOICE`](super::argmax::NO_CHOICE); no rows where no id asks for
    /// one.
    pub previous: Tensor<'a>,
    /// `[tokens, hidden]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Looks `ids` `[tokens]` up in `table` `[vocabulary, hidden]`; gives `[tokens, hidden]`. Ids with the bit
    /// [`PREVIOUS`] are read from `previous` `[rows]` first.
    pub fn embed(
        &self,
        table: &Tensor<'_>,
        ids: &Tensor<'_>,
        previous: &Tensor<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "embed";
        check::weight(OP, "table", table, self.target())?;
        check::holds(table.rows() < PREVIOUS as usize, OP, "table", table, "fewer than 2^31 rows")?;
        check::index_list(OP, "ids", ids)?;
        check::index_list(OP, "previous", previous)?;
        let out = self.empty([ids.rows(), table.columns()])?;
        self.count(Work { flops: 0, bytes: table.dtype().bytes(out.shape().elements()) + out.bytes() + ids.bytes() });
        self.backend.embed(Call {
            table: table.view(),
            ids: ids.view(),
            previous: previous.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}
