//! Self-attention of a decoder layer over blocks of keys and values.

use bursar_kernels::{
    Backend, KernelError, KvLayer, Scope, Tensor,
    ops::{attention_paged::PagedSequences, rotary::Rope},
};

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

/// What every layer of a step shares.
pub struct StepInputs<'a> {
    /// `[axes, tokens]` u32
    pub positions: Tensor<'a>,
    /// `[tokens]` u32
    pub slots: Tensor<'a>,
    /// Rows and pasts of the sequences.
    pub sequences: PagedSequences<'a>,
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
        let keys_at = self.heads * shape.head_dim;
        let values_at = keys_at + shape.kv_heads * shape.head_dim;
        let mut qkv = self.qkv.forward(&scope, normed)?; // [tokens, (heads + 2 * kv_heads) * head_dim]
        scope.rotary(&mut qkv, self.heads + shape.kv_heads, &step.positions, rope)?;
        let queries = qkv.column_range(0..keys_at);
        let (keys, values) = (qkv.column_range(keys_at..values_at), qkv.column_range(values_at..qkv.columns()));
        scope.kv_write(&keys, &values, &step.slots, cache)?;
        let attended = scope.attention_paged(&queries, cache, &step.sequences)?; // [tokens, heads * head_dim]
        self.out.forward_add(&scope, &attended, hidden)?;
        scope.all_reduce(hidden)
    }
}
