//! Writing new keys and values into the cache's blocks.

use crate::{Backend, KernelError, KvLayer, Scope, Tensor, Work};

use super::check;

/// A slot for which nothing is written: the padding of a batch leaves no trace.
pub const NO_SLOT: u32 = u32::MAX;

/// What a backend is asked to do: row `i` of `keys` and `values` goes to token `slots[i] % 16` of block
/// `slots[i] / 16`, unless the slot is [`NO_SLOT`].
#[non_exhaustive]
pub struct Call<'a> {
    /// `[tokens, kv_heads * head_dim]` activations; a gap between rows is allowed.
    pub keys: Tensor<'a>,
    /// As `keys`.
    pub values: Tensor<'a>,
    /// `[tokens]` u32, each below `16 * blocks` or [`NO_SLOT`].
    pub slots: Tensor<'a>,
    /// Where to write.
    pub layer: &'a KvLayer,
}

impl<B: Backend> Scope<'_, B> {
    /// Writes `keys` and `values` `[tokens, kv_heads * head_dim]` into `layer` at `slots` `[tokens]`.
    pub fn kv_write(
        &self,
        keys: &Tensor<'_>,
        values: &Tensor<'_>,
        slots: &Tensor<'_>,
        layer: &KvLayer,
    ) -> Result<(), KernelError> {
        const OP: &str = "kv_write";
        let columns = layer.shape.kv_heads * layer.shape.head_dim;
        check::index_list(OP, "slots", slots)?;
        check::cache(OP, layer, self.target().activation())?;
        for (what, tensor) in [("keys", keys), ("values", values)] {
            check::activation(OP, what, tensor, self.target().activation())?;
            check::shape(OP, what, tensor, [slots.rows(), columns])?;
        }
        self.count(Work { flops: 0, bytes: (keys.bytes() + values.bytes()) * 2 });
        self.backend.kv_write(Call { keys: keys.view(), values: values.view(), slots: slots.view(), layer })
    }
}
