//! Embedding: one row of a table per token.

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, RankShard, Scope, Tensor, Weight, Work, calls, input_token::PREVIOUS};

use super::{check, product::check_weight};

impl<B: Backend> Scope<'_, B> {
    /// Looks up `ids` `[tokens]` in `table` `[vocabulary, hidden]`. Returns `[tokens, hidden]`. The
    /// ids of unseen tokens are read from `previous` `[rows]`.
    pub fn embed<'a>(
        &self,
        table: impl Into<Weight<'a>>,
        ids: &Tensor<'_>,
        previous: &Tensor<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        let table = table.into();
        let tokens = RankShard::all(table.rows());
        self.embed_share(table, tokens, ids, previous, 1.0)
    }

    /// Like [`embed`](Scope::embed), but the first `tokens.count` rows of `table` are only a share
    /// of the vocabulary, and other rows may follow. The output rows of tokens outside this share
    /// are zeros. All rows are multiplied by `scale`, which is rounded to the activations' type
    /// first, as transformers does (`Gemma3TextScaledWordEmbedding`, 5.17).
    pub fn embed_share<'a>(
        &self,
        table: impl Into<Weight<'a>>,
        tokens: RankShard,
        ids: &Tensor<'_>,
        previous: &Tensor<'_>,
        scale: f32,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "embed";
        let table = table.into();
        match table.blocks {
            Some(_) => check_weight(OP, &table, self.target())?,
            None => check::weight(OP, "table", &table.data, self.target())?,
        }
        check::holds(tokens.whole < PREVIOUS as usize, OP, "table", &table.data, "fewer than 2^31 rows")?;
        check::holds(tokens.count <= table.rows(), OP, "table", &table.data, "a row for each token")?;
        check::index_list(OP, "ids", ids)?;
        check::index_list(OP, "previous", previous)?;
        let out = self.empty([ids.rows(), table.columns()])?;
        let read = Bytes(table.bytes().0.div_ceil(table.rows().max(1) as u64) * ids.rows() as u64);
        let bytes = read + out.bytes() + ids.bytes();
        self.count(Work { bytes, ..Work::default() });
        self.backend.embed(calls::Embed {
            table: table.view(),
            tokens,
            ids: ids.view(),
            previous: previous.view(),
            scale: self.target().activation().round(scale),
            out: out.view(),
        })?;
        Ok(out)
    }
}
