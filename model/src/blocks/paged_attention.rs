//! Self-attention of a decoder layer over the blocks of the KV cache.

use bursar_kernels::{
    Activations, Backend, KernelError, KvLayer, Scope, Tensor,
    ops::{rotary::Rope, rotary_kv_write::HeadNorms as NormsOf},
};

/// The norms of query and key heads.
pub type HeadNorms = NormsOf<'static>;

use super::step_inputs::StepInputs;
use crate::weights::Linear;

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.
pub struct PagedAttention {
    /// `[(heads + 2 * kv_heads) * head_dim, hidden]`: queries, keys, values.
    pub qkv: Linear,
    /// `[hidden, heads * head_dim]`
    pub out: Linear,
    /// Norms of each query and key head, if the model has them.
    pub norms: Option<HeadNorms>,
    /// `[2, kv_heads]` f32: scales of the cached keys and values of each head, if
    /// the cache is quantized.
    pub cache_scales: Option<Tensor<'static>>,
    pub heads: usize,
    /// Factor that attention scores are multiplied by.
    pub scale: f32,
}

impl PagedAttention {
    /// Projects `normed` `[tokens, hidden]` to queries, keys and values, rotates
    /// queries and keys by their positions, and writes keys and values to `cache`.
    /// Returns `[tokens, (heads + 2 * kv_heads) * head_dim]`. Callers may use only the
    /// queries of the result.
    pub fn project<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Activations<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &KvLayer,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut qkv = self.qkv.forward(scope, normed)?;
        let norms = self.norms.as_ref();
        let cache = cache.scaled(self.cache_scales.as_ref());
        scope.rotary_kv_write(&mut qkv, self.heads, norms, &step.positions, rope, &step.slots, cache)?;
        Ok(qkv)
    }

    /// Attention of the queries in `qkv` `[tokens, (heads + 2 * kv_heads) * head_dim]` over
    /// `cache`. Returns `[tokens, heads * head_dim]`.
    pub fn attend<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        qkv: &Tensor<'_>,
        step: &StepInputs<'_>,
        cache: &KvLayer,
    ) -> Result<Tensor<'s>, KernelError> {
        let queries = qkv.column_range(0..self.heads * cache.shape().head_dim);
        let cache = cache.scaled(self.cache_scales.as_ref());
        scope.attention_paged(&queries, cache, &step.sequences, self.scale)
    }
}
