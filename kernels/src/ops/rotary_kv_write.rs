//! Rotary embedding of queries and keys, fused with the write of keys and values into KV cache
//! blocks. Each element is read once.

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, KvLayer, ScaledLayer, Scope, Tensor, Work};

use super::{
    check,
    rotary::{PairAxes, Rope, check_rope},
};

/// The slot number of a row whose keys and values are not written. Padding rows have this slot, so
/// that they leave the cache unchanged.
pub const NO_SLOT: u32 = u32::MAX;

/// Norms of each query and key head before rotation (RMS, as in Qwen3, arXiv 2505.09388).
#[derive(Debug)]
pub struct HeadNorms<'m> {
    /// `[head_dim]`, the target's type of weights.
    pub query: Tensor<'m>,
    /// `[head_dim]`, the type of `query`.
    pub key: Tensor<'m>,
    /// Constant added to the mean square.
    pub epsilon: f32,
}

/// Rotates queries in place, as [`rotary`](Scope::rotary) does. Keys are rotated too. The keys and
/// values of a row are written to token `slots[row] % 16` of block `slots[row] / 16`, unless the
/// slot is [`NO_SLOT`]. The contents of the key columns are undefined afterwards.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]` activations: queries, keys, values. A gap
    /// between rows is allowed.
    pub qkv: Tensor<'a>,
    pub heads: usize,
    /// Norms of queries and keys before rotation.
    pub norms: Option<&'a HeadNorms<'a>>,
    /// `[axes, tokens]` u32.
    pub positions: Tensor<'a>,
    /// `[head_dim / 2]` f32.
    pub frequencies: Tensor<'a>,
    /// The axis that each pair follows.
    pub axes: &'a PairAxes,
    /// `[tokens]` u32, each below `16 * blocks` or [`NO_SLOT`].
    pub slots: Tensor<'a>,
    pub layer: &'a KvLayer,
    /// `[2, kv_heads]` f32 for a layer of E4M3 elements. The keys and values of a head are divided
    /// by their scales and rounded once, to the nearest. Magnitudes above 448 after the division
    /// are clamped to 448, and NaN stays NaN.
    pub scales: Option<Tensor<'a>>,
}

impl<B: Backend> Scope<'_, B> {
    /// Normalizes each query and key head if there are `norms`, rotates the queries and keys of
    /// `qkv` `[tokens, (heads + 2 * kv_heads) * head_dim]` by `positions` `[axes, tokens]`, and
    /// writes keys and values into `cache` at `slots` `[tokens]`. After the call, only the queries
    /// in `qkv` are valid.
    #[expect(clippy::too_many_arguments, reason = "one pass over memory does three things")]
    pub fn rotary_kv_write<'a>(
        &self,
        qkv: &mut Tensor<'_>,
        heads: usize,
        norms: Option<&HeadNorms<'_>>,
        positions: &Tensor<'_>,
        rope: &Rope<'_>,
        slots: &Tensor<'_>,
        cache: impl Into<ScaledLayer<'a>>,
    ) -> Result<(), KernelError> {
        const OP: &str = "rotary_kv_write";
        let cache = cache.into();
        let shape = cache.layer.shape;
        check::activation(OP, "qkv", qkv, self.target().activation())?;
        check::cache(OP, cache, self.target().activation())?;
        check::writable(OP, "qkv", qkv);
        check::index_list(OP, "slots", slots)?;
        check::shape(OP, "qkv", qkv, [slots.rows(), (heads + 2 * shape.kv_heads) * shape.head_dim])?;
        check_rope(OP, qkv, positions, rope)?;
        check::shape(OP, "frequencies", &rope.frequencies, [shape.head_dim / 2])?;
        let turned = qkv.rows() * (heads + shape.kv_heads) * shape.head_dim;
        let cached = qkv.rows() * 2 * shape.kv_heads * shape.head_dim;
        let mut work = Work::over(3 * turned as u64, &[qkv, positions, slots]);
        work.bytes += qkv.dtype().bytes(qkv.rows() * heads * shape.head_dim) + shape.dtype.bytes(cached);
        work.bytes += rope.frequencies.bytes() + cache.scales.map_or(Bytes::ZERO, Tensor::bytes);
        if let Some(HeadNorms { query, key, .. }) = norms {
            for (what, weight) in [("query norm", query), ("key norm", key)] {
                check::weight(OP, what, weight, self.target())?;
                check::shape(OP, what, weight, [shape.head_dim])?;
            }
            check::holds(query.dtype() == key.dtype(), OP, "key norm", key, "the query norm's type")?;
            work.flops += 4 * turned as u64;
            work.bytes += query.bytes() + key.bytes();
        }
        self.count(work);
        self.backend.rotary_kv_write(Call {
            qkv: qkv.view(),
            heads,
            norms,
            positions: positions.view(),
            frequencies: rope.frequencies.view(),
            axes: &rope.axes,
            slots: slots.view(),
            layer: cache.layer,
            scales: cache.scales.map(Tensor::view),
        })
    }
}
