//! Bidirectional attention within packed ranges of rows ("sequences"), each a picture or a window
//! of a picture. No score matrix is ever stored (online softmax, Milakov and Gimelshein 2018, arXiv
//! 1805.02867; FlashAttention, arXiv 2205.14135).

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

/// Ranges of rows that attend only to themselves.
#[derive(Debug)]
pub struct PackedSequences<'m> {
    /// `[sequences + 1]` u32: sequence `s` has the rows `starts[s]..starts[s + 1]`. Together the
    /// sequences cover all rows from 0.
    pub starts: Tensor<'m>,
    /// An upper bound on the rows of a sequence. Backends with a kernel for short sequences use
    /// that kernel if all sequences are short.
    pub longest: usize,
    /// Sum of the squared sequence lengths. The amount of arithmetic is proportional to this sum.
    pub query_key_pairs: u64,
}

impl<B: Backend> Scope<'_, B> {
    /// Computes attention of `qkv` `[rows, 3 * heads * head_dim]` within `sequences`, scaled
    /// by `head_dim^-0.5`. Returns `[rows, heads * head_dim]`.
    pub fn attention_packed(
        &self,
        qkv: &Tensor<'_>,
        heads: usize,
        sequences: &PackedSequences<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        let head_dim = qkv.columns() / 3 / heads.max(1);
        self.attention_packed_scaled(qkv, heads, sequences, (head_dim as f32).powf(-0.5))
    }

    /// Like [`attention_packed`](Scope::attention_packed), with scores multiplied by `scale`.
    pub fn attention_packed_scaled(
        &self,
        qkv: &Tensor<'_>,
        heads: usize,
        sequences: &PackedSequences<'_>,
        scale: f32,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "attention_packed";
        let hidden = qkv.columns() / 3;
        check::activation(OP, "qkv", qkv, self.target().activation())?;
        check::holds(
            hidden > 0 && qkv.columns() == 3 * hidden && heads > 0 && hidden.is_multiple_of(heads),
            OP,
            "qkv",
            qkv,
            "queries, keys and values with equally many whole heads",
        )?;
        check::index_list(OP, "starts", &sequences.starts)?;
        check::holds(sequences.starts.rows() > 0, OP, "starts", &sequences.starts, "a start and an end at least")?;
        let head_dim = hidden / heads;
        check::head_dim(OP, "qkv", qkv, head_dim, self.target().packed_head_dims())?;
        let out = self.empty([qkv.rows(), hidden])?;
        self.count(Work::over(4 * sequences.query_key_pairs * hidden as u64, &[qkv, &out]));
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().packed_scratch(head_dim))?;
        self.backend.attention_packed(calls::AttentionPacked {
            qkv: qkv.view(),
            heads,
            head_dim,
            scale,
            starts: sequences.starts.view(),
            longest: sequences.longest,
            scratch: scratch.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}
