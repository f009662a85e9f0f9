//! Argmax of logits that are computed only for a part of the vocabulary.

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, Scope, Tensor, Weight, Work, calls};

use super::check;

pub use crate::calls::CLUSTERS_MAX;

/// A vocabulary divided into clusters of equal size, and the score of each cluster for each row.
pub struct TokenClusters<'a> {
    /// `[rows, clusters]` f32: a score of each cluster for each row. There are at most
    /// [`CLUSTERS_MAX`] clusters.
    pub scores: &'a Tensor<'a>,
    /// `[vocabulary]` u32, contiguous: the tokens of the first cluster, then of the second, and so on.
    pub tokens: &'a Tensor<'a>,
    /// A row chooses among the tokens of the clusters whose score is at least its `top`-th largest
    /// score. A cluster whose score is NaN is never selected.
    pub top: usize,
}

impl<B: Backend> Scope<'_, B> {
    /// Writes to `out` `[rows]` u32 the token with the largest logit for each row of `x`
    /// `[rows, width]`. The logits are the products of `x` and `table` `[vocabulary, width]`, and are
    /// computed only for the tokens of the row's best `clusters`. Of equal logits, the smallest token
    /// wins. A row without logits that are numbers gives [`NO_CHOICE`](super::argmax::NO_CHOICE).
    ///
    /// This is the output layer of Gemma 4 assistants (transformers 5.17,
    /// `Gemma4AssistantMaskedEmbedder`).
    pub fn clustered_argmax_into(
        &self,
        x: &Tensor<'_>,
        table: &Weight<'_>,
        clusters: TokenClusters<'_>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "clustered_argmax";
        let TokenClusters { scores, tokens, top } = clusters;
        check::activation(OP, "x", x, self.target().activation())?;
        check::holds(x.columns() > 0, OP, "x", x, "at least one column")?;
        check::weight(OP, "table", &table.data, self.target())?;
        check::holds(table.columns() == x.columns(), OP, "table", &table.data, "as many columns as x")?;
        check::holds(table.data.is_contiguous(), OP, "table", &table.data, "contiguous rows")?;
        check::f32(OP, "scores", scores)?;
        check::holds(scores.rows() == x.rows(), OP, "scores", scores, "as many rows as x")?;
        let count = scores.columns();
        check::holds((1..=CLUSTERS_MAX).contains(&count), OP, "scores", scores, "1 to 4096 clusters")?;
        check::holds((1..=count).contains(&top), OP, "scores", scores, "a `top` from 1 to the number of clusters")?;
        check::index_list(OP, "tokens", tokens)?;
        let is_whole = tokens.rows() > 0 && tokens.rows().is_multiple_of(count);
        check::holds(is_whole, OP, "tokens", tokens, "a positive multiple of the columns of scores")?;
        check::indices(OP, "out", out)?;
        check::shape(OP, "out", out, [x.rows()])?;
        check::writable(OP, "out", out);
        let products = x.rows() * top * (tokens.rows() / count);
        let read = table.data.dtype().bytes(products * x.columns());
        self.count(Work {
            flops: 2 * (products * x.columns()) as u64,
            bytes: read + x.bytes() + scores.bytes() + out.bytes() + Bytes(4 * products as u64),
            ..Work::default()
        });
        self.backend.clustered_argmax(calls::ClusteredArgmax {
            x: x.view(),
            table: table.data.view(),
            scores: scores.view(),
            tokens: tokens.view(),
            top,
            out: out.view(),
        })
    }
}
