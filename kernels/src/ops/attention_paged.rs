//! Attention of new tokens over a paged cache (PagedAttention, Kwon et al., SOSP'23,
//! arXiv 2309.06180), for prefill chunks and single decoding tokens in one batch. No score
//! matrix is ever stored.

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, KvShape, ScaledLayer, Scope, Tensor, Work, calls};

use super::check;

pub use crate::calls::{AttentionMask, PagedSequences};

impl<B: Backend> Scope<'_, B> {
    /// Computes attention of `queries` `[tokens, heads * head_dim]` over the blocks of `cache`.
    /// Each row attends to the tokens of its sequence up to and including its own token, within
    /// the window of `mask`, and to the later tokens that `mask` adds. Scores are multiplied by
    /// `scale`, usually `head_dim^-0.5`. Returns `[tokens, heads * head_dim]`.
    pub fn attention_paged<'a, 'm>(
        &self,
        queries: &Tensor<'_>,
        cache: impl Into<ScaledLayer<'a>>,
        sequences: &PagedSequences<'_>,
        scale: f32,
        mask: impl Into<AttentionMask<'m>>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "attention_paged";
        let AttentionMask { window, key_ends } = mask.into();
        let cache = cache.into();
        let shape = cache.layer.shape;
        let heads = queries.columns() / shape.head_dim;
        check::cache(OP, cache, self.target().activation())?;
        check::activation(OP, "queries", queries, self.target().activation())?;
        check::holds(
            queries.columns() == heads * shape.head_dim && heads.is_multiple_of(shape.kv_heads) && heads > 0,
            OP,
            "queries",
            queries,
            "a whole number of heads in each group",
        )?;
        check::head_dim(OP, "queries", queries, shape.head_dim, self.target().paged_head_dims())?;
        let count = sequences.context_lengths.rows();
        check::shape(OP, "query_starts", &sequences.query_starts, [count + 1])?;
        check::holds(
            sequences.block_tables.rows() == count,
            OP,
            "block_tables",
            &sequences.block_tables,
            "one row per sequence",
        )?;
        check::holds(
            sequences.single_rows <= count.min(queries.rows()),
            OP,
            "queries",
            queries,
            "a row for each sequence with a single row",
        )?;
        check::holds(window != Some(0), OP, "queries", queries, "a window of at least 1 token, not 0")?;
        check::indices(OP, "query_starts", &sequences.query_starts)?;
        check::index_list(OP, "context_lengths", &sequences.context_lengths)?;
        check::indices(OP, "block_tables", &sequences.block_tables)?;
        if let Some(key_ends) = key_ends {
            check::shape(OP, "key_ends", key_ends, [queries.rows()])?;
            check::index_list(OP, "key_ends", key_ends)?;
        }
        let out = self.empty([queries.rows(), queries.columns()])?;
        self.count(work(sequences, cache, queries, window, &out));
        let inner = self.scope();
        let bytes = self.target().paged_scratch(shape, heads, sequences.single_rows, queries.rows());
        let scratch = inner.take_scratch(bytes)?;
        self.backend.attention_paged(calls::AttentionPaged {
            queries: queries.view(),
            heads,
            scale,
            window,
            key_ends: key_ends.map(Tensor::view),
            layer: cache.layer,
            scales: cache.scales.map(Tensor::view),
            sequences,
            scratch: scratch.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}

/// Returns the work of a call. The context lengths are on the device, so the number of keys to read
/// is derived from `query_key_pairs`. The result is exact if all sequences have equally many rows
/// (`n` rows over a context of `c` attend to `n * c - n * (n - 1) / 2` keys) and, with a window,
/// equally long contexts, as in one prefill. In a mixed step it is an estimate.
fn work(
    sequences: &PagedSequences<'_>,
    cache: ScaledLayer<'_>,
    queries: &Tensor<'_>,
    window: Option<usize>,
    out: &Tensor<'_>,
) -> Work {
    let (count, rows) = (sequences.context_lengths.rows() as u64, queries.rows() as u64);
    let whole_pairs = sequences.query_key_pairs;
    let whole_keys = ((2 * count * whole_pairs).checked_div(rows).unwrap_or(0) + rows.saturating_sub(count)) / 2;
    let (pairs, keys) = match window {
        Some(window) if count > 0 => {
            let window = window as u64;
            let (of_each, context) = (rows / count, whole_keys / count);
            // Without the window, the last row of a sequence would attend to `cut_tokens` more
            // tokens, and each earlier row would gain one token less than the row after it.
            let cut_tokens = context.saturating_sub(window);
            let cut = cut_tokens.min(of_each);
            let hidden = cut * cut_tokens - cut * cut.saturating_sub(1) / 2;
            let keys = whole_keys.min(count.saturating_mul(window).saturating_add(rows.saturating_sub(count)));
            (whole_pairs.saturating_sub(count * hidden), keys)
        }
        _ => (whole_pairs, whole_keys),
    };
    let token_bytes = KvShape { layers: 1, ..cache.layer.shape }.token_bytes();
    let flops = 4 * pairs * queries.columns() as u64;
    let mut work = Work::over(flops, &[queries, out, &sequences.block_tables]);
    work.bytes += token_bytes * keys + cache.scales.map_or(Bytes::ZERO, Tensor::bytes);
    work
}
