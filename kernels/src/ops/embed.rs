//! Embedding: one row of a table per token.

use crate::{Backend, KernelError, RankShard, Scope, Tensor, Work, input_token::PREVIOUS};

use super::check;

/// Computes `out[i] = table[ids[i]]`, converted to activations. `ids[i]` is the
/// [code](crate::InputToken::code) of a token. The id of a token that the host has not seen is
/// `previous[row]`. If that entry is [`NO_CHOICE`](super::argmax::NO_CHOICE), no token was
/// chosen, and the output row is all zeros. For a token that is not in `tokens`, the output row
/// is all zeros too.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[tokens.count, hidden]`, floating point.
    pub table: Tensor<'a>,
    /// The tokens of the vocabulary that have a row in the table.
    pub tokens: RankShard,
    /// `[tokens]` u32: codes of tokens. Known ids are below the vocabulary, and unseen tokens name
    /// a row of `previous`.
    pub ids: Tensor<'a>,
    /// `[rows]` u32, each below the vocabulary or [`NO_CHOICE`](super::argmax::NO_CHOICE). The
    /// tensor is empty if all ids are known.
    pub previous: Tensor<'a>,
    /// `[tokens, hidden]` activations.
    pub out: Tensor<'a>,
}

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
        self.backend.embed(Call {
            table: table.view(),
            tokens,
            ids: ids.view(),
            previous: previous.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}
