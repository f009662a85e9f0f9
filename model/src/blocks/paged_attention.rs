//! Self-attention of a decoder layer over blocks of keys and values.

use bursar_kernels::{Backend, KernelError, KvLayer, Scope, Tensor, ops::rotary::Rope};

use super::step_inputs::StepInputs;
use crate::weights::Linear;

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.
pub struct PagedAttention {
    /// `[(heads + 2 * kv_heads) * head_dim, hidden]`: queries, keys, values.
    pub qkv: Linear,
    /// `[hidden, heads * head_dim]`
    pub out: Linear,
    /// Heads of queries.
    pub heads: usize,
}

impl PagedAttention {
    /// Adds the attention of `normed` `[tokens, hidden]` to `hidden` `[tokens, hidden]`, and leaves the tokens' keys
    /// and values in `cache`.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        normed: &Tensor<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &KvLayer,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let shape = cache.shape();
        let query_columns = self.heads * shape.head_dim;
        let mut qkv = self.qkv.forward(&scope, normed)?; // [tokens, (heads + 2 * kv_heads) * head_dim]
        scope.rotary_kv_write(&mut qkv, self.heads, &step.positions, rope, &step.slots, cache)?;
        let queries = qkv.column_range(0..query_columns);
        let attended = scope.attention_paged(&queries, cache, &step.sequences)?; // [tokens, heads * head_dim]
        self.out.forward_add(&scope, &attended, hidden)?;
        scope.all_reduce(hidden)
    }
}
