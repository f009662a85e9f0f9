//! A decoder of equal layers, as Qwen2, QwQ and Qwen2.5-VL have it: embeddings in, logits out.

use bursar_kernels::{
    Backend, KernelError, KvLayer, KvShape, Scope, Target, Tensor,
    ops::{attention_paged::PagedSequences, rotary::Rope},
};

use super::{
    gated_mlp::GatedMlp,
    paged_attention::{PagedAttention, StepInputs},
};
use crate::{
    flow::StepBatch,
    weights::{WeightError, WeightMap},
};

/// The numbers that define a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Rows of the embedding and of the logits.
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Added to the mean square in norms.
    pub norm_epsilon: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Pairs of elements that follow each position axis; one entry for plain text.
    pub rope_sections: Vec<usize>,
    /// Longest sequence that the model was made for.
    pub context_tokens: usize,
    /// The embedding serves as output projection too.
    pub tied_embeddings: bool,
}

impl DecoderConfig {
    /// What a token's keys and values look like on `target`.
    pub fn kv_shape(&self, target: &Target) -> KvShape {
        KvShape { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim, dtype: target.activation() }
    }
}

/// The decoder's weights.
pub struct Decoder {
    config: DecoderConfig,
    embedding: Tensor<'static>, // [vocabulary, hidden]
    layers: Vec<Layer>,
    norm: Tensor<'static>,               // [hidden]
    projection: Option<Tensor<'static>>, // [vocabulary, hidden], if not the embedding
    rope: Rope<'static>,
}

struct Layer {
    attention_norm: Tensor<'static>, // [hidden]
    attention: PagedAttention,
    mlp_norm: Tensor<'static>, // [hidden]
    mlp: GatedMlp,
}

/// Rows of logits that a prompt is scored by at a time.
pub const SCORE_ROWS: usize = 32;

/// The memory of earlier passes that a step reads, and its part of which it writes.
pub struct StepCaches<'a> {
    /// Keys and values, one entry a layer.
    pub layers: &'a [KvLayer],
    /// `[rows, hidden]`: embeddings of pictures.
    pub pictures: Option<&'a Tensor<'a>>,
    /// `[rows]` u32: what the step before has chosen, a row of its logits each. Tokens that the host has not seen are
    /// read from there; see [`StepBatch::tokens`].
    pub previous: &'a Tensor<'a>,
}

impl Decoder {
    /// Claims the decoder's weights, named as Qwen2 checkpoints name them.
    pub fn claim(config: DecoderConfig, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let embedding = map.tensor("model.embed_tokens.weight", [config.vocabulary, config.hidden])?;
        let layers = (0..config.layers).map(|index| Layer::claim(&config, index, map)).collect::<Result<_, _>>()?;
        let norm = map.tensor("model.norm.weight", [config.hidden])?;
        let projection = match config.tied_embeddings {
            true => {
                // Saved all the same by some tools; it equals the embedding then.
                map.ignore("lm_head.weight");
                None
            }
            false => Some(map.tensor("lm_head.weight", [config.vocabulary, config.hidden])?),
        };
        let frequencies = map.constant(&rope_frequencies(config.rope_theta, config.head_dim));
        let rope = Rope { frequencies, sections: config.rope_sections.clone() };
        Ok(Decoder { config, embedding, layers, norm, projection, rope })
    }

    /// The numbers that define it.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Runs one step; gives the logits of the rows that want them, `[logit_rows, vocabulary]`. A step in which no row
    /// wants logits gives a tensor of no rows. Logits are f32 on every target. `score` is called with the logits of the scored rows, `[rows,
    /// vocabulary]`, at most [`SCORE_ROWS`] of them at a time: those of a whole prompt would take gigabytes.
    pub fn step<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        mut score: impl FnMut(&Scope<'_, B>, &Tensor<'_>) -> Result<(), KernelError>,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut logits = scope.empty_f32([batch.logit_rows.len(), self.config.vocabulary])?;
        let inner = scope.scope();
        let inputs = self.upload(&inner, batch)?;
        let mut hidden = self.embed(&inner, batch, caches)?; // [tokens, hidden]
        for (layer, cache) in self.layers.iter().zip(caches.layers) {
            layer.forward(&inner, &self.config, &self.rope, &inputs, cache, &mut hidden)?;
        }
        if !batch.logit_rows.is_empty() {
            self.project(&inner, &hidden, &batch.logit_rows, &mut logits)?;
        }
        for rows in batch.score_rows.chunks(SCORE_ROWS) {
            let inner = inner.scope();
            let mut scored = inner.empty_f32([rows.len(), self.config.vocabulary])?;
            self.project(&inner, &hidden, rows, &mut scored)?;
            score(&inner, &scored)?;
        }
        Ok(logits)
    }

    /// The logits of some rows of `hidden` `[tokens, hidden]`.
    fn project<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        hidden: &Tensor<'_>,
        rows: &[u32],
        logits: &mut Tensor<'_>, // [rows, vocabulary]
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let rows = scope.upload([rows.len()], rows)?;
        let chosen = scope.gather_rows(hidden, &rows)?; // [rows, hidden]
        let normed = scope.rms_norm(&chosen, &self.norm, self.config.norm_epsilon)?;
        scope.linear_into(&normed, self.projection.as_ref().unwrap_or(&self.embedding), None, logits)
    }

    fn upload<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
    ) -> Result<StepInputs<'s>, KernelError> {
        let (tokens, sequences, axes) = (batch.token_count(), batch.sequence_count(), self.config.rope_sections.len());
        Ok(StepInputs {
            // A decoder with one axis takes the first: text moves along all of them at once.
            positions: scope.upload([axes, tokens], &batch.positions[..axes * tokens])?,
            slots: scope.upload([tokens], &batch.slots)?,
            sequences: PagedSequences {
                query_starts: scope.upload([sequences + 1], &batch.query_starts)?,
                context_lengths: scope.upload([sequences], &batch.context_lengths)?,
                block_tables: scope.upload([sequences, batch.blocks_max()], &batch.block_tables)?,
                single_rows: batch.single_rows(),
                query_key_pairs: batch.query_key_pairs,
            },
        })
    }

    /// Embeds the tokens and lets the pictures' embeddings take their placeholders.
    fn embed<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let ids = scope.upload([batch.token_count()], &batch.tokens)?;
        let mut hidden = scope.embed(&self.embedding, &ids, caches.previous)?;
        if let (Some(pictures), false) = (caches.pictures, batch.picture_rows.is_empty()) {
            let merge = scope.scope();
            let count = batch.picture_rows.len();
            let from = merge.upload([count], &batch.picture_cache_rows)?;
            let to = merge.upload([count], &batch.picture_rows)?;
            let rows = merge.gather_rows(pictures, &from)?; // [count, hidden]
            merge.scatter_rows(&rows, &to, &mut hidden)?;
        }
        Ok(hidden)
    }
}

impl Layer {
    fn claim(config: &DecoderConfig, index: usize, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        let (query_rows, kv_rows) = (config.heads * head_dim, config.kv_heads * head_dim);
        let [query, key, value] = ["q", "k", "v"].map(|part| name(&format!("self_attn.{part}_proj")));
        Ok(Layer {
            attention_norm: map.tensor(&name("input_layernorm.weight"), [hidden])?,
            attention: PagedAttention {
                qkv: map.fused_linear(&[(&query, query_rows), (&key, kv_rows), (&value, kv_rows)], hidden, true)?,
                out: map.linear(&name("self_attn.o_proj"), hidden, query_rows, false)?,
                heads: config.heads,
            },
            mlp_norm: map.tensor(&name("post_attention_layernorm.weight"), [hidden])?,
            mlp: map.gated_mlp(
                ["gate", "up", "down"].map(|part| name(&format!("mlp.{part}_proj"))).each_ref().map(String::as_str),
                (hidden, config.intermediate),
                false,
            )?,
        })
    }

    fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        config: &DecoderConfig,
        rope: &Rope<'_>,
        inputs: &StepInputs<'_>,
        cache: &KvLayer,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = scope.rms_norm(hidden, &self.attention_norm, config.norm_epsilon)?;
            self.attention.forward(&scope, &normed, rope, inputs, cache, hidden)?;
        }
        let scope = scope.scope();
        let normed = scope.rms_norm(hidden, &self.mlp_norm, config.norm_epsilon)?;
        self.mlp.forward(&scope, &normed, hidden)
    }
}

/// Radians per position for each pair of a head: `theta^(-2 i / dim)`.
pub fn rope_frequencies(theta: f64, dim: usize) -> Vec<f32> {
    (0..dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / dim as f64) as f32).collect()
}
