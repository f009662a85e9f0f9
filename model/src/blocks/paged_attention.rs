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
    /// Queries, keys and values of `normed` `[tokens, hidden]`, turned by their positions, and the keys and values in
    /// `cache`; gives `[tokens, (heads + 2 * kv_heads) * head_dim]`, in which the queries stand.
    pub fn project<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Tensor<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &KvLayer,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut qkv = self.qkv.forward(scope, normed)?;
        scope.rotary_kv_write(&mut qkv, self.heads, &step.positions, rope, &step.slots, cache)?;
        Ok(qkv)
    }

    /// What the queries in `qkv` `[tokens, (heads + 2 * kv_heads) * head_dim]` attend to, in `cache`; gives
    /// `[tokens, heads * head_dim]`.
    pub fn attend<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        qkv: &Tensor<'_>,
        step: &StepInputs<'_>,
        cache: &KvLayer,
    ) -> Result<Tensor<'s>, KernelError> {
        let queries = qkv.column_range(0..self.heads * cache.shape().head_dim);
        scope.attention_paged(&queries, cache, &step.sequences)
    }

    /// Adds what was attended to `[rows, heads * head_dim]` to `hidden` `[rows, hidden]`.
    pub fn add<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        attended: &Tensor<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.out.forward_add(scope, attended, hidden)
    }
}
