//! Embedding: one row of a table for each id.

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// What a backend is asked to compute: `out[i] = table[ids[i]]`, widened or narrowed to activations.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[vocabulary, hidden]`, floating point.
    pub table: Tensor<'a>,
    /// `[tokens]` u32, each below the vocabulary.
    pub ids: Tensor<'a>,
    /// `[tokens, hidden]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Looks `ids` `[tokens]` up in `table` `[vocabulary, hidden]`; gives `[tokens, hidden]`.
    pub fn embed(&self, table: &Tensor<'_>, ids: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "embed";
        check::weight(OP, "table", table, self.target())?;
        check::index_list(OP, "ids", ids)?;
        let out = self.empty([ids.rows(), table.columns()])?;
        self.count(Work { flops: 0, bytes: table.dtype().bytes(out.shape().elements()) + out.bytes() + ids.bytes() });
        self.backend.embed(Call { table: table.view(), ids: ids.view(), out: out.view() })?;
        Ok(out)
    }
}
