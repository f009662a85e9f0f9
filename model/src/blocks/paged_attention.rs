//! Self-attention of a decoder layer over the blocks of the KV cache.

use bursar_kernels::{
    Activations, Backend, KernelError, RankShard, Scope, Tensor,
    ops::{
        attention_paged::AttentionMask,
        rms_norm::RmsNorm,
        rotary::Rope,
        rotary_kv_write::{CachedValues, HeadNorms},
    },
};

use super::{
    decoder_config::{DecoderConfig, PictureMask},
    decoder_share::{DecoderShare, KvHeads},
    layer_cache::LayerCache,
    mixed::Mixed,
    step_inputs::StepInputs,
};
use crate::weights::{Linear, NormScaling, WeightError, WeightMap};

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.
pub struct PagedAttention {
    /// `[(heads + 2 * kv_heads) * head_dim, hidden]`: queries, keys, values. There are no values if
    /// they are the keys, and neither keys nor values if the layer reads those of another layer.
    /// `heads * head_dim` rows of gates follow, if the result is gated.
    pub qkv: Linear,
    /// `[hidden, heads * head_dim]`
    pub out: Linear,
    norms: Norms,
    /// `[2, kv_heads]` f32: scales of the cached keys and values of each head, if
    /// the cache is quantized.
    cache_scales: Option<Tensor<'static>>,
    heads: usize,
    /// Whether the result is multiplied by the sigmoid of gates (Qiu et al. 2025, arXiv
    /// 2505.06708).
    has_gate: bool,
    /// Factor that attention scores are multiplied by.
    scale: f32,
    /// Number of tokens that a query attends to, including its own. `None` means all.
    window: Option<usize>,
    /// Whether a token of a picture attends to later tokens of its picture.
    has_picture_mask: bool,
}

/// Norms of the heads before the rotation, if the model has them.
enum Norms {
    None,
    Heads(HeadNorms<'static>),
    /// `[head_dim]`, of query heads: the layer reads the keys and values of another layer.
    Queries {
        weight: Tensor<'static>,
        weight_offset: f32,
        epsilon: f32,
    },
}

impl PagedAttention {
    /// Claims the weights of layer `index`, under `name`, for the heads of this rank.
    pub fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        config: &DecoderConfig,
        share: &DecoderShare,
        index: usize,
    ) -> Result<Self, WeightError> {
        let qkv = PagedAttention::claim_qkv(map, name, config, share, index, config.hidden.into())?;
        PagedAttention::claim_rest(map, name, config, share, index, qkv)
    }

    /// Claims the columns `inputs` of [`qkv`](Self::qkv) of layer `index`, for the heads of this rank.
    pub fn claim_qkv(
        map: &mut WeightMap<'_>,
        name: &str,
        config: &DecoderConfig,
        share: &DecoderShare,
        index: usize,
        inputs: RankShard,
    ) -> Result<Linear, WeightError> {
        let KvHeads { kv_heads, head_dim, keys_are_values } = share.attention(config, index);
        let (query_rows, kv_rows) = (share.heads.times(head_dim), kv_heads.times(head_dim));
        let [query, key, value] = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{name}.{part}"));
        // With gates, `q_proj` has the rows of each head's query, followed by the rows of its gate.
        let of_head = |head: usize, half: usize| RankShard {
            first: (2 * head + half) * head_dim,
            count: head_dim,
            whole: 2 * query_rows.whole,
        };
        let of_heads = |half: usize| share.heads.range().map(move |head| of_head(head, half));
        let is_source = config.has_own_kv(index);
        let kept = if is_source { 2 - usize::from(keys_are_values) } else { 0 };
        let keys_values = [(key.as_str(), kv_rows), (value.as_str(), kv_rows)].into_iter().take(kept);
        if kept == 0 {
            // Checkpoints may have weights of the keys and values that such a layer does not compute.
            ["k_proj", "v_proj", "k_norm", "v_norm"]
                .iter()
                .for_each(|part| map.leave_unread(&format!("{name}.{part}")));
        }
        let named = |rows| (query.as_str(), rows);
        let rows: Vec<_> = if config.output_gate {
            of_heads(0).map(named).chain(keys_values).chain(of_heads(1).map(named)).collect()
        } else {
            std::iter::once(named(query_rows)).chain(keys_values).collect()
        };
        map.fused_linear(&rows, inputs, config.biases.qkv)
    }

    /// Claims all weights except those of the claimed projection `qkv`.
    pub fn claim_rest(
        map: &mut WeightMap<'_>,
        name: &str,
        config: &DecoderConfig,
        share: &DecoderShare,
        index: usize,
        qkv: Linear,
    ) -> Result<Self, WeightError> {
        let part = |part: &str| format!("{name}.{part}");
        let KvHeads { kv_heads, head_dim, keys_are_values } = share.attention(config, index);
        let (hidden, is_source) = (config.hidden, config.has_own_kv(index));
        let query_rows = share.heads.times(head_dim);
        // YaRN multiplies the rotated elements of queries and keys by a factor. If RoPE rotates all
        // elements, the scores are multiplied by the square of the factor instead. Otherwise, the
        // weights of the norms before the rotation include the factor.
        let factor = config.rope_of(index).1.attention_factor();
        let scaled = (config.rotary_dim < config.head_dim && factor != 1.0).then_some(NormScaling {
            elements: config.rotary_dim,
            weight_offset: config.norm_offset,
            factor,
        });
        let score_factor = if scaled.is_some() { 1.0 } else { factor * factor };
        let norms = if config.head_norms {
            let mut norm = |name: &str| match scaled {
                Some(scaled) => map.scaled_norm(&part(name), head_dim, scaled),
                None => map.tensor(&part(name), [head_dim]),
            };
            let (query, weight_offset, epsilon) = (norm("q_norm.weight")?, config.norm_offset, config.norm_epsilon);
            let values = match (config.value_norms, keys_are_values) {
                (false, _) => CachedValues::Unchanged,
                (true, false) => CachedValues::Normalized,
                (true, true) => CachedValues::NormalizedKeys,
            };
            if is_source {
                Norms::Heads(HeadNorms { query, key: norm("k_norm.weight")?, weight_offset, epsilon, values })
            } else {
                Norms::Queries { weight: query, weight_offset, epsilon }
            }
        } else {
            Norms::None
        };
        let source = config.kv_source(index).map(|source| name.replace(&format!(".{index}."), &format!(".{source}.")));
        let cache_scales = source.map(|source| map.cache_scales(&source, kv_heads)).transpose()?.flatten();
        Ok(PagedAttention {
            qkv,
            norms,
            cache_scales,
            out: map.linear(&part("o_proj"), hidden, query_rows, config.biases.out)?,
            heads: share.heads.count,
            has_gate: config.output_gate,
            scale: config.attention_scale * score_factor,
            window: config.window(index),
            has_picture_mask: match config.picture_mask {
                PictureMask::Causal => false,
                PictureMask::WholePicture => true,
                PictureMask::WholePictureInWindows => config.window(index).is_some(),
            },
        })
    }

    /// Claims the scales of the cache of the attention module `source`, whose keys and values this
    /// layer reads.
    pub fn claim_cache_scales(
        &mut self,
        map: &mut WeightMap<'_>,
        source: &str,
        kv_heads: RankShard,
    ) -> Result<(), WeightError> {
        self.cache_scales = map.cache_scales(source, kv_heads)?;
        Ok(())
    }

    /// Projects `normed` `[tokens, hidden]` to queries, keys, values and gates, rotates queries and
    /// keys by their positions, and writes keys and values to `cache`, unless they are those of
    /// another layer. Returns one row of [`qkv`](Self::qkv) per token. Only the queries and gates in
    /// it are valid afterward.
    pub fn project<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Activations<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &LayerCache,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut projected = self.qkv.forward(scope, normed)?;
        if let Norms::Queries { weight, weight_offset, epsilon } = &self.norms {
            let norm = RmsNorm { weight, weight_offset: *weight_offset, epsilon: *epsilon };
            scope.rotary(&mut projected, self.heads, Some(norm), &step.positions, rope)?;
            return Ok(projected);
        }
        self.write(scope, &mut projected, (rope, &step.positions), step, cache)?;
        Ok(projected)
    }

    /// Rotates the queries and keys in `projected` `[tokens, rows of qkv]` by `positions`
    /// `[axes, tokens]`, and writes keys and values to `cache`.
    pub fn write<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        projected: &mut Tensor<'_>,
        (rope, positions): (&Rope<'_>, &Tensor<'_>),
        step: &StepInputs<'_>,
        cache: &LayerCache,
    ) -> Result<(), KernelError> {
        let (layer, group) = cache.kv();
        let (shape, slots) = (layer.shape(), &step.groups[group].slots);
        let norms = match &self.norms {
            Norms::Heads(norms) => Some(norms),
            Norms::None | Norms::Queries { .. } => None,
        };
        let kv_heads = norms.map_or(CachedValues::Unchanged, |norms| norms.values).row_kv_heads(shape.kv_heads);
        let mut qkv = projected.column_range_mut(0..(self.heads + kv_heads) * shape.head_dim);
        let cache = layer.scaled(self.cache_scales.as_ref());
        scope.rotary_kv_write(&mut qkv, self.heads, norms, positions, rope, slots, cache)
    }

    /// Writes keys and values of `normed` `[tokens, hidden]` to `cache`, then computes attention
    /// over `cache`. Returns `[tokens, heads * head_dim]`, the input of [`out`](Self::out).
    pub fn mix<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Activations<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &LayerCache,
    ) -> Result<Mixed<'s>, KernelError> {
        let projected = self.project(scope, normed, rope, step, cache)?;
        self.attend(scope, projected, step, cache)
    }

    /// Computes attention over `cache` for the queries in `projected`, which
    /// [`project`](Self::project) returned. The result is that of [`mix`](Self::mix).
    pub fn attend<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        projected: Tensor<'s>,
        step: &StepInputs<'_>,
        cache: &LayerCache,
    ) -> Result<Mixed<'s>, KernelError> {
        let (layer, group) = cache.kv();
        let width = self.heads * layer.shape().head_dim;
        let scaled = layer.scaled(self.cache_scales.as_ref());
        let queries = projected.column_range(0..width);
        let sequences = &step.groups[group].sequences;
        let mask =
            AttentionMask { window: self.window, key_ends: step.key_ends.as_ref().filter(|_| self.has_picture_mask) };
        let mut rows = scope.attention_paged(&queries, scaled, sequences, self.scale, mask)?;
        if self.has_gate {
            let gates = projected.column_range(projected.columns() - width..projected.columns());
            scope.sigmoid_mul(&mut rows, &gates)?;
        }
        Ok(Mixed { rows, spare: projected })
    }
}
