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
    /// The attention of `normed` `[tokens, hidden]`, whose keys and values it leaves in `cache`; gives
    /// `[tokens, heads * head_dim]`.
    pub fn attend<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Tensor<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &KvLayer,
    ) -> Result<Tensor<'s>, KernelError> {
        let query_columns = self.heads * cache.shape().head_dim;
        let mut attended = scope.empty([normed.rows(), query_columns])?;
        let inner = scope.scope();
        let qkv = self.write(&inner, normed, rope, step, cache)?;
        inner.attention_paged_into(&qkv.column_range(0..query_columns), cache, &step.sequences, &mut attended)?;
        Ok(attended)
    }

    /// Leaves the keys and values of `normed` `[tokens, hidden]` in `cache`; gives
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]`, of which the queries are turned.
    pub fn write<'s, B: Backend>(
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

    /// Adds what was attended to `[rows, heads * head_dim]` to `hidden` `[rows, hidden]`.
    pub fn add<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        attended: &Tensor<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.out.forward_add(scope, attended, hidden)?;
        scope.all_reduce(hidden)
    }
}
