//! Rotary embedding of queries and keys, fused with the write of keys and values into KV cache
//! blocks. Each element is read once.

use bursar_budgets::Bytes;

use crate::{Backend, KernelError, ScaledLayer, Scope, Tensor, Work, calls};

use super::{
    check,
    rotary::{Rope, check_rope},
};

pub use crate::calls::{CachedValues, HeadNorms, NO_SLOT};

impl<B: Backend> Scope<'_, B> {
    /// Normalizes each query and key head if there are `norms`, rotates the queries and keys of
    /// `qkv` `[tokens, (heads + 2 * kv_heads) * head_dim]` by `positions` `[axes, tokens]`, and
    /// writes keys and values into `cache` at `slots` `[tokens]`. After the call, only the queries
    /// in `qkv` are valid. With [`CachedValues::NormalizedKeys`], `qkv` has no values.
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
        let values = norms.map_or(CachedValues::Unchanged, |norms| norms.values);
        let columns = (heads + values.row_kv_heads(shape.kv_heads)) * shape.head_dim;
        check::shape(OP, "qkv", qkv, [slots.rows(), columns])?;
        check_rope(OP, qkv, positions, rope)?;
        let is_inside = 2 * rope.frequencies.rows() <= shape.head_dim;
        check::holds(is_inside, OP, "frequencies", &rope.frequencies, "at most `head_dim / 2` elements")?;
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
        self.backend.rotary_kv_write(calls::RotaryKvWrite {
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
