//! Attention in both directions within packed stretches of rows: a picture, or one window of it. No score matrix is
//! ever stored (online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention, arXiv 2205.14135).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Stretches of rows that see themselves and nothing else.
#[derive(Debug)]
pub struct Stretches<'m> {
    /// `[stretches + 1]` u32: stretch `s` has the rows `starts[s]..starts[s + 1]`; together all rows, from 0 on.
    pub starts: Tensor<'m>,
    /// Rows of the longest, at least: backends with a kernel of its own for short ones use it where all are.
    pub longest: usize,
    /// The sum of the squares of their lengths: what the arithmetic is proportional to.
    pub query_key_pairs: u64,
}

/// What a backend is asked to compute: softmax attention of each row over all rows of its stretch.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, 3 * heads * head_dim]` activations: queries, keys, values.
    pub qkv: Tensor<'a>,
    /// Heads of queries, and as many of keys and values.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// `[stretches + 1]` u32.
    pub starts: Tensor<'a>,
    /// Rows of the longest stretch, at least.
    pub longest: usize,
    /// What the target declared with [`Target::packed_scratch`](crate::Target::packed_scratch).
    pub scratch: Tensor<'a>,
    /// `[rows, heads * head_dim]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Attention of `qkv` `[rows, 3 * heads * head_dim]` within `stretches`, scaled by `head_dim^-0.5`; gives
    /// `[rows, heads * head_dim]`.
    pub fn attention_packed(
        &self,
        qkv: &Tensor<'_>,
        heads: usize,
        stretches: &Stretches<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "attention_packed";
        let hidden = qkv.columns() / 3;
        check::activation(OP, "qkv", qkv, self.target().activation())?;
        check::holds(
            hidden > 0 && qkv.columns() == 3 * hidden && heads > 0 && hidden.is_multiple_of(heads),
            OP,
            "qkv",
            qkv,
            "queries, keys and values of as many whole heads",
        )?;
        check::index_list(OP, "starts", &stretches.starts)?;
        check::holds(stretches.starts.rows() > 0, OP, "starts", &stretches.starts, "a start and an end at least")?;
        let head_dim = hidden / heads;
        check::head_dim(OP, "qkv", qkv, head_dim, self.target())?;
        let out = self.empty([qkv.rows(), hidden])?;
        self.count(Work::over(4 * stretches.query_key_pairs * hidden as u64, &[qkv, &out]));
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().packed_scratch(head_dim))?;
        self.backend.attention_packed(Call {
            qkv: qkv.view(),
            heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            starts: stretches.starts.view(),
            longest: stretches.longest,
            scratch: scratch.view(),
            out: out.view(),
        })?;
        Ok(out)
    }
}
