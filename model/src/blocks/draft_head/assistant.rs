//! Gemma 4 assistants: draft models whose attention layers compute only queries, and read the decoder's
//! keys and values.
//! The names of the weights and the order of the operations are those of transformers (5.17,
//! `modeling_gemma4_assistant.py`). All drafts of a step see the same context and have the position of
//! the token that the step chose.

use bursar_kernels::{Activations, Backend, KernelError, RankShard, Scope, Tensor, Weight};

use super::rows::{DraftColumns, DraftLogits, DraftResults, DraftRows};
use crate::{
    blocks::{
        decoder_config::{AssistantConfig, DecoderConfig},
        layer::{Layer, LayerPass, Stream},
        layer_cache::LayerCache,
        ropes::Ropes,
        step_inputs::StepInputs,
    },
    checkpoint::DRAFT_MODEL,
    weights::{WeightError, WeightMap},
};

/// The shard of an assistant on one rank. Attention and MLPs are divided as in the decoder. All other
/// weights are replicated on every rank.
pub struct AssistantHead {
    config: AssistantConfig,
    /// The two halves of the input projection, `[hidden, decoder's hidden]` each. The first is applied to
    /// the embedding, the second to the decoder's row.
    projections: [Weight<'static>; 2],
    layers: Vec<Layer>,
    norm: Tensor<'static>, // [hidden]
    ropes: Ropes,
    /// `[decoder's hidden, hidden]`: maps the assistant's rows to the input rows of the next draft.
    output: Weight<'static>,
    projection: Weight<'static>, // [padded vocabulary, hidden]
    clusters: Option<Clusters>,
}

struct Clusters {
    centroids: Weight<'static>, // [clusters, hidden]
    /// `[vocabulary]` u32: the tokens of each cluster.
    tokens: Tensor<'static>,
}

impl AssistantHead {
    /// Claims the tensors of the draft model. They are never quantized. The names of the decoder's
    /// weights begin with `prefix`.
    ///
    /// # Errors
    /// The error of a tensor that is missing or has the wrong shape or value, and
    /// [`WeightError::Ranks`] if the assistant cannot be divided among the ranks.
    pub fn claim(
        decoder: &DecoderConfig,
        config: &AssistantConfig,
        prefix: &str,
        map: &mut WeightMap<'_>,
    ) -> Result<Self, WeightError> {
        map.set_in_draft_model(true);
        let head = AssistantHead::claim_tensors(decoder, config, prefix, map);
        map.set_in_draft_model(false);
        head
    }

    fn claim_tensors(
        decoder: &DecoderConfig,
        config: &AssistantConfig,
        prefix: &str,
        map: &mut WeightMap<'_>,
    ) -> Result<Self, WeightError> {
        let (layers, name) = (&config.layers, |part: &str| format!("{DRAFT_MODEL}.{part}"));
        let (hidden, share) = (layers.hidden, layers.share(map.rank())?);
        let input = name("pre_projection");
        let mut half = |index: usize| {
            let columns = RankShard { first: index * decoder.hidden, count: decoder.hidden, whole: 2 * decoder.hidden };
            map.unquantized_linear(&[(&input, hidden.into())], columns).map(|linear| linear.weight)
        };
        let projections = [half(0)?, half(1)?];
        let mut claim = |(index, source): (usize, &usize)| {
            let place = name(&format!("model.layers.{index}"));
            let mut layer = Layer::claim(layers, &share, index, &place, map, &mut std::iter::empty())?;
            let kv_heads = share.attention(layers, index).kv_heads;
            layer.claim_cache_scales(map, &format!("{prefix}.layers.{source}.self_attn"), kv_heads)?;
            Ok(layer)
        };
        let own_layers = config.sources.iter().enumerate().map(&mut claim).collect::<Result<_, WeightError>>()?;
        let output = (&*name("post_projection"), decoder.hidden.into());
        let output = map.unquantized_linear(&[output], RankShard::from(hidden))?.weight;
        let (embedding, projection) = (name("model.embed_tokens.weight"), name("lm_head.weight"));
        let used = if layers.tied_embeddings {
            map.allow_tied(&projection, &embedding);
            &embedding
        } else {
            map.leave_unread(&name("model.embed_tokens"));
            &projection
        };
        let projection = map.vocabulary(used, layers.vocabulary.into(), layers.vocabulary, hidden)?;
        let clusters = config.clusters.map(|clusters| {
            let centroids = (&*name("masked_embedding.centroids"), clusters.count.into());
            let centroids = map.unquantized_linear(&[centroids], RankShard::from(hidden))?.weight;
            let tokens = map.token_ids(&name("masked_embedding.token_ordering"), layers.vocabulary)?;
            Ok::<_, WeightError>(Clusters { centroids, tokens })
        });
        let clusters = clusters.transpose()?;
        if clusters.is_none() {
            map.leave_unread(&name("masked_embedding"));
        }
        Ok(AssistantHead {
            projections,
            layers: own_layers,
            norm: map.tensor(&name("model.norm.weight"), [hidden])?,
            ropes: Ropes::claim(layers, map),
            output,
            projection,
            clusters,
            config: config.clone(),
        })
    }

    /// Allocates the results of a pass with `rows` drafts, including padding columns.
    pub(in crate::blocks) fn empty_results<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        rows: usize,
    ) -> Result<DraftResults<'s>, KernelError> {
        let columns = self.clusters.as_ref().map_or(self.projection.rows(), |clusters| clusters.centroids.rows());
        let normed = Some(scope.empty([rows, self.config.layers.hidden])?);
        Ok(DraftResults { logits: scope.empty_f32([rows, columns])?, normed })
    }

    /// Computes drafts for all rows of `inputs`. `embedded` `[rows, decoder's hidden]` has the scaled
    /// embedding of the token after each row, and `rows.hidden` `[rows, decoder's hidden]` the
    /// decoder's rows after the final norm, or the output rows of the previous draft. `caches` has the
    /// cache of each decoder layer.
    pub(in crate::blocks) fn forward<'s, B: Backend>(
        &'s self,
        scope: &Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &[LayerCache],
        embedded: &Tensor<'_>,
        rows: DraftRows<'_, '_>,
        results: DraftResults<'s>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        let (config, count) = (&self.config.layers, embedded.rows());
        let DraftResults { mut logits, normed } = results;
        let mut normed = normed.expect("`empty_results` allocates the rows of an assistant");
        if count > 0 {
            let mut hidden = scope.empty([count, config.hidden])?;
            let [of_embedding, of_row] = &self.projections;
            scope.linear_into(embedded, of_embedding, None, &mut hidden)?;
            scope.linear_add(&rows.hidden.row_range(0..count), of_row, None, &mut hidden)?;
            let formats = self.layers.iter().flat_map(Layer::norm_formats);
            let scratch = scope.activation_scratch(formats, count, config.hidden)?;
            let mut stream = Stream { hidden, scratch, is_normed: false };
            for (index, (layer, source)) in self.layers.iter().zip(&self.config.sources).enumerate() {
                let pass = LayerPass { config, rope: self.ropes.of(config, index), inputs, embeddings: None };
                layer.forward(scope, &pass, &caches[*source], &mut stream, self.layers.get(index + 1))?;
            }
            let mut out = Activations::of_plain(normed.row_range_mut(0..count));
            scope.rms_norm_into(&stream.hidden, config.norm(&self.norm), &mut out)?;
            scope.linear_into(&normed, &self.output, None, &mut rows.output.row_range_mut(0..count))?;
            let projection = self.clusters.as_ref().map_or(&self.projection, |clusters| &clusters.centroids);
            scope.linear_into(&normed, projection, None, &mut logits)?;
        }
        let Some((clusters, settings)) = self.clusters.as_ref().zip(self.config.clusters) else {
            let logits = logits.into_column_range(0..config.vocabulary);
            return Ok(DraftLogits { logits, columns: DraftColumns::Whole });
        };
        let columns = DraftColumns::Clusters {
            normed,
            projection: &self.projection,
            tokens: &clusters.tokens,
            top: settings.top,
        };
        Ok(DraftLogits { logits, columns })
    }
}
