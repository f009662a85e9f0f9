//! Embedding: one row of a table per token.

use crate::{Backend, KernelError, RankShard, Scope, Tensor, Work, calls, input_token::PREVIOUS};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Looks up `ids` `[tokens]` in `table` `[vocabulary, hidden]`. Returns `[tokens, hidden]`. The
    /// ids of unseen tokens are read from `previous` `[rows]`.
    pub fn embed(
        &self,
        table: &Tensor<'_>,
        ids: &Tensor<'_>,
        previous: &Tensor<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        self.embed_share(table, RankShard::all(table.rows()), ids, previous)
    }

    /// Like [`embed`](Scope::embed), but `table` `[tokens.count, hidden]` has only a share of the
    /// vocabulary. The rows of all other tokens are zeros.
    pub fn embed_share(
        &self,
        table: &Tensor<'_>,
        tokens: RankShard,
        ids: &Tensor<'_>,
        previous: &Tensor<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "embed";
        check::weight(OP, "table", table, self.target())?;
        check::holds(tokens.whole < PREVIOUS as usize, OP, "table", table, "fewer than 2^31 rows")?;
        check::shape(OP, "table", table, [tokens.count, table.columns()])?;
        check::index_list(OP, "ids", ids)?;
        check::index_list(OP, "previous", previous)?;
        let out = self.empty([ids.rows(), table.columns()])?;
        let bytes = table.dtype().bytes(out.shape().elements()) + out.bytes() + ids.bytes();
        self.count(Work { bytes, ..Work::default() });
        self.backend.embed(calls::Embed {
            table: table.view(),
            tokens,
            ids: ids.view(),
            previous: previous.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}
