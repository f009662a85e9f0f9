//! Causal attention of new tokens over a paged cache (PagedAttention, Kwon et al., SOSP'23, arXiv 2309.06180), for
//! prefill chunks and single decoding tokens in one batch. No score matrix is ever stored.

use crate::{Backend, KernelError, KvLayer, KvShape, Scope, Tensor, Work};

use super::check;

/// Which rows belong to which sequence, and where each sequence's past lies.
#[derive(Debug)]
pub struct PagedSequences<'m> {
    /// `[sequences + 1]` u32: sequence `s` has the rows `query_starts[s]..query_starts[s + 1]`; together all rows, from
    /// 0 on.
    pub query_starts: Tensor<'m>,
    /// `[sequences]` u32: tokens in the cache, this step's rows included. A sequence of one row and none is padding, which
    /// comes out as zeros; it stands among the [`single_rows`](Self::single_rows).
    pub context_lengths: Tensor<'m>,
    /// `[sequences, blocks_max]` u32: the blocks of each sequence, in order; unused places are not read.
    pub block_tables: Tensor<'m>,
    /// How many sequences from the first on have exactly one row, as those that decode do: backends with a kernel of its
    /// own for them use it. Fewer than there are is slower and not wrong.
    pub single_rows: usize,
    /// Pairs of a query and a key it sees, over all sequences: what the arithmetic is proportional to.
    pub query_key_pairs: u64,
}

/// What a backend is asked to compute: the `r`-th of a sequence's `n` rows sees its first `context - n + r + 1` tokens.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[tokens, heads * head_dim]` activations; a gap between rows is allowed.
    pub queries: Tensor<'a>,
    /// Query heads; a group of `heads / kv_heads` of them shares one head of keys and values.
    pub heads: usize,
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// The layer's keys and values, this step's included. Where every sequence has one row, what stands in front of that
    /// row may be read before the operation in front has ended: it was there before this step.
    pub layer: &'a KvLayer,
    /// Rows and pasts.
    pub sequences: &'a PagedSequences<'a>,
    /// What the target declared with [`Target::paged_scratch`](crate::Target::paged_scratch).
    pub scratch: Tensor<'a>,
    /// `[tokens, heads * head_dim]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Attention of `queries` `[tokens, heads * head_dim]` over the blocks of `layer`, each row seeing its own
    /// sequence up to itself, scaled by `head_dim^-0.5`; gives `[tokens, heads * head_dim]`.
    pub fn attention_paged(
        &self,
        queries: &Tensor<'_>,
        layer: &KvLayer,
        sequences: &PagedSequences<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "attention_paged";
        let shape = layer.shape;
        let heads = queries.columns() / shape.head_dim;
        check::cache(OP, layer, self.target().activation())?;
        check::activation(OP, "queries", queries, self.target().activation())?;
        check::holds(
            queries.columns() == heads * shape.head_dim && heads.is_multiple_of(shape.kv_heads) && heads > 0,
            OP,
            "queries",
            queries,
            "a whole number of heads in each group",
        )?;
        check::head_dim(OP, "queries", queries, shape.head_dim, self.target())?;
        let count = sequences.context_lengths.rows();
        check::shape(OP, "query_starts", &sequences.query_starts, [count + 1])?;
        check::holds(
            sequences.block_tables.rows() == count,
            OP,
            "block_tables",
            &sequences.block_tables,
            "one row a sequence",
        )?;
        check::holds(
            sequences.single_rows <= count.min(queries.rows()),
            OP,
            "queries",
            queries,
            "a row for each sequence that has one",
        )?;
        check::indices(OP, "query_starts", &sequences.query_starts)?;
        check::index_list(OP, "context_lengths", &sequences.context_lengths)?;
        check::indices(OP, "block_tables", &sequences.block_tables)?;
        let out = self.empty([queries.rows(), queries.columns()])?;
        self.count(work(sequences, layer, queries, &out));
        let inner = self.scope();
        let bytes = self.target().paged_scratch(shape, heads, sequences.single_rows, queries.rows());
        let scratch = inner.take_scratch(bytes)?;
        self.backend.attention_paged(Call {
            queries: queries.view(),
            heads,
            scale: (shape.head_dim as f32).powf(-0.5),
            layer,
            sequences,
            scratch: scratch.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}

/// What it costs. The lengths of the pasts are on the device; the keys that must be read follow from the pairs if all
/// sequences bring equally many rows (`n` rows of a past of `c` see `n * c - n * (n - 1) / 2` keys), as in a step of
/// decoding or one prefill, and are an estimate in a mixed step.
fn work(sequences: &PagedSequences<'_>, layer: &KvLayer, queries: &Tensor<'_>, out: &Tensor<'_>) -> Work {
    let (count, rows) = (sequences.context_lengths.rows() as u64, queries.rows() as u64);
    let keys = (count * sequences.query_key_pairs).checked_div(rows).unwrap_or(0) + rows.saturating_sub(count) / 2;
    let token_bytes = KvShape { layers: 1, ..layer.shape }.token_bytes();
    let flops = 4 * sequences.query_key_pairs * queries.columns() as u64;
    let mut work = Work::over(flops, &[queries, out, &sequences.block_tables]);
    work.bytes += token_bytes * keys;
    work
}
