//! Rotates queries and keys and writes keys and values into the cache's blocks, reading each element once.

use crate::{Backend, KernelError, KvLayer, Scope, Tensor, Work};

use super::{
    check,
    rotary::{Rope, check_rope},
};

/// A slot for which nothing is written, so that a batch's padding leaves the cache unchanged.
pub const NO_SLOT: u32 = u32::MAX;

/// Rotates queries in place, as [`rotary`](Scope::rotary) does. Keys are rotated too and written, with the values of
/// their row, to token `slots[row] % 16` of block `slots[row] / 16`, unless the slot is [`NO_SLOT`]. The contents of
/// the key columns afterwards are undefined.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]` activations: queries, keys, values; a gap between rows is allowed.
    pub qkv: Tensor<'a>,
    /// Query heads.
    pub heads: usize,
    /// `[axes, tokens]` u32.
    pub positions: Tensor<'a>,
    /// `[head_dim / 2]` f32.
    pub frequencies: Tensor<'a>,
    /// Pairs per axis.
    pub sections: &'a [usize],
    /// `[tokens]` u32, each below `16 * blocks` or [`NO_SLOT`].
    pub slots: Tensor<'a>,
    /// The layer to write to.
    pub layer: &'a KvLayer,
}

impl<B: Backend> Scope<'_, B> {
    /// Rotates the queries and keys of `qkv` `[tokens, (heads + 2 * kv_heads) * head_dim]` by `positions`
    /// `[axes, tokens]`, and writes keys and values into `layer` at `slots` `[tokens]`. Afterwards only the queries in
    /// `qkv` are valid.
    pub fn rotary_kv_write(
        &self,
        qkv: &mut Tensor<'_>,
        heads: usize,
        positions: &Tensor<'_>,
        rope: &Rope<'_>,
        slots: &Tensor<'_>,
        layer: &KvLayer,
    ) -> Result<(), KernelError> {
        const OP: &str = "rotary_kv_write";
        let shape = layer.shape;
        check::activation(OP, "qkv", qkv, self.target().activation())?;
        check::cache(OP, layer, self.target().activation())?;
        check::writable(OP, "qkv", qkv);
        check::index_list(OP, "slots", slots)?;
        check::shape(OP, "qkv", qkv, [slots.rows(), (heads + 2 * shape.kv_heads) * shape.head_dim])?;
        check_rope(OP, qkv, positions, rope)?;
        check::shape(OP, "frequencies", &rope.frequencies, [shape.head_dim / 2])?;
        let turned = qkv.rows() * (heads + shape.kv_heads) * shape.head_dim;
        let mut work = Work::over(3 * turned as u64, &[qkv, qkv, positions, slots]);
        work.bytes += rope.frequencies.bytes();
        self.count(work);
        self.backend.rotary_kv_write(Call {
            qkv: qkv.view(),
            heads,
            positions: positions.view(),
            frequencies: rope.frequencies.view(),
            sections: &rope.sections,
            slots: slots.view(),
            layer,
        })
    }
}
