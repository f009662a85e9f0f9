//! EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one Llama layer that reads the embedding of the next
//! token and a combination of the decoder's rows at three depths. The names of the weights and the
//! order of the norms are the same as in vLLM (0.33, `llama_eagle3.py`).

use bursar_kernels::{Backend, KernelError, RankShard, Scope, Tensor, Weight, ops::rotary::Rope};

use super::rows::{DraftColumns, DraftLogits, DraftRows};
use crate::{
    blocks::{
        decoder_config::{DecoderConfig, Eagle3Config},
        gated_mlp::GatedMlp,
        layer_cache::LayerCache,
        paged_attention::PagedAttention,
        step_inputs::StepInputs,
    },
    checkpoint::DRAFT_MODEL,
    weights::{WeightError, WeightMap},
};

/// The shard of an EAGLE-3 head on one rank. Attention and MLP are divided as in the decoder. All
/// other weights are replicated on every rank.
pub struct Eagle3Head {
    config: Eagle3Config,
    /// `[hidden, decoder's hidden]` each: the columns of the projection `fc` for each of the layers
    /// that the head reads.
    fc: Vec<Weight<'static>>,
    /// `[own tokens, hidden]`: the head's embedding. `None` if the head uses the decoder's.
    embedding: Option<Weight<'static>>,
    embedding_norm: Tensor<'static>, // [hidden]
    hidden_norm: Tensor<'static>,    // [hidden]
    /// Attention whose `qkv` reads the embedding.
    attention: PagedAttention,
    /// `[rows of qkv, hidden]`: the columns of `qkv` that read the combined rows.
    qkv_of_hidden: Weight<'static>,
    mlp_norm: Tensor<'static>, // [hidden]
    mlp: GatedMlp,
    norm: Tensor<'static>,       // [hidden]
    projection: Weight<'static>, // [padded vocabulary, hidden]
    /// `[vocabulary]` u32: the tokens of a reduced vocabulary.
    ids: Option<Tensor<'static>>,
    rope: Rope<'static>,
}

impl Eagle3Head {
    /// Claims the tensors of the draft model. They are never quantized.
    ///
    /// # Errors
    /// The error of a tensor that is missing or has the wrong shape or value, and
    /// [`WeightError::Ranks`] if the head cannot be divided among the ranks.
    pub fn claim(decoder: &DecoderConfig, config: &Eagle3Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        map.set_in_draft_model(true);
        let head = Eagle3Head::claim_tensors(decoder, config, map);
        map.set_in_draft_model(false);
        head
    }

    fn claim_tensors(
        decoder: &DecoderConfig,
        config: &Eagle3Config,
        map: &mut WeightMap<'_>,
    ) -> Result<Self, WeightError> {
        let (layer, name) = (&config.layer, |part: &str| format!("{DRAFT_MODEL}.{part}"));
        let (hidden, share) = (layer.hidden, layer.share(map.rank())?);
        // The authors' checkpoints and later tools name the only layer differently.
        let place = if map.has(&name("midlayer.hidden_norm.weight")) { "midlayer" } else { "layers.0" };
        let of_layer = |part: &str| name(&format!("{place}.{part}"));
        // `t2d`, the inverse of `d2t`, is needed only for training.
        map.leave_unread(&name("t2d"));
        let (depths, fc) = (config.layers_read.len(), name("fc"));
        let mut columns_of = |depth: usize| {
            let columns =
                RankShard { first: depth * decoder.hidden, count: decoder.hidden, whole: depths * decoder.hidden };
            map.unquantized_linear(&[(&fc, hidden.into())], columns).map(|linear| linear.weight)
        };
        let fc = (0..depths).map(&mut columns_of).collect::<Result<_, _>>()?;
        let embedding = name("embed_tokens.weight");
        // The decoder's embedding fits only rows of the same width.
        let has_embedding = hidden != decoder.hidden || map.has(&embedding);
        let embedding = if has_embedding { Some(map.table(&embedding, share.vocabulary, hidden)?) } else { None };
        let attention = of_layer("self_attn");
        let [qkv, of_hidden] = [0, hidden].map(|first| {
            let inputs = RankShard { first, count: hidden, whole: 2 * hidden };
            PagedAttention::claim_qkv(map, &attention, layer, &share, 0, inputs)
        });
        let attention = PagedAttention::claim_rest(map, &attention, layer, &share, 0, qkv?)?;
        let mlp = ["gate", "up", "down"].map(|part| of_layer(&format!("mlp.{part}_proj")));
        let mlp = mlp.each_ref().map(String::as_str);
        let mlp = GatedMlp::claim(map, mlp, (hidden, share.intermediate), layer.biases.mlp, layer.activation)?;
        let mut norm = |name: String| map.tensor(&format!("{name}.weight"), [hidden]);
        Ok(Eagle3Head {
            fc,
            embedding,
            embedding_norm: norm(of_layer("input_layernorm"))?,
            hidden_norm: norm(of_layer("hidden_norm"))?,
            attention,
            qkv_of_hidden: of_hidden?.weight,
            mlp_norm: norm(of_layer("post_attention_layernorm"))?,
            mlp,
            norm: norm(name("norm"))?,
            projection: map.vocabulary(&name("lm_head.weight"), config.vocabulary.into(), config.vocabulary, hidden)?,
            ids: map.draft_ids(&name("d2t"), config.vocabulary, decoder.vocabulary)?,
            rope: Rope {
                frequencies: map.constant(&layer.rope_scaling.frequencies(layer.rope_theta, layer.rotary_dim)),
                axes: layer.rope_axes.clone(),
            },
            config: config.clone(),
        })
    }

    /// The head's embedding. `None` if the head uses the decoder's.
    pub fn embedding(&self) -> Option<&Weight<'static>> {
        self.embedding.as_ref()
    }

    /// Runs the head's layer over all rows of a step, and writes the chosen rows to `rows.output`
    /// before the head's norm. `embedded` `[tokens, hidden]` has the embedding of the token after
    /// each row. If no row is chosen, only keys and values are computed.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        inputs: &StepInputs<'_>,
        cache: &LayerCache,
        embedded: &Tensor<'_>,
        rows: DraftRows<'_, '_>,
    ) -> Result<(), KernelError> {
        let (layer, DraftRows { hidden, output }) = (&self.config.layer, rows);
        let tokens = embedded.rows();
        let mut projected = scope.empty([tokens, self.qkv_of_hidden.rows()])?;
        {
            let scope = scope.scope();
            let normed = scope.rms_norm(embedded, layer.norm(&self.embedding_norm))?;
            let qkv = &self.attention.qkv;
            scope.linear_into(&normed, &qkv.weight, qkv.bias.as_ref(), &mut projected)?;
        }
        let normed = scope.rms_norm(hidden, layer.norm(&self.hidden_norm))?;
        scope.linear_add(&normed, &self.qkv_of_hidden, None, &mut projected)?;
        let positions = inputs.positions.row_range(0..layer.rope_axes.count());
        self.attention.write(scope, &mut projected, (&self.rope, &positions), inputs, cache)?;
        let count = inputs.chosen_rows.as_ref().map_or(tokens, Tensor::rows);
        if count == 0 {
            return Ok(());
        }
        let mixed = self.attention.attend(scope, projected, inputs, cache)?.rows;
        let residual = if self.config.adds_normed { &normed } else { hidden };
        let mut output = output.row_range_mut(0..count);
        // This tensor is allocated even if every row is chosen, because sizing measures such a pass
        // and no other pass may use more memory.
        let mut of_chosen = scope.empty([count, mixed.columns()])?;
        let mixed = if let Some(chosen) = &inputs.chosen_rows {
            scope.gather_rows_into(residual, chosen, &mut output)?;
            scope.gather_rows_into(&mixed, chosen, &mut of_chosen)?;
            &of_chosen
        } else {
            scope.copy_rows_into(residual, &mut output)?;
            &mixed
        };
        self.attention.out.forward_add(scope, mixed, &mut output)?;
        let normed = scope.rms_norm_as(&output, layer.norm(&self.mlp_norm), self.mlp.reads())?;
        self.mlp.forward(scope, normed, &mut output)
    }

    /// Allocates logits of `rows` rows, including padding columns.
    pub fn empty_logits<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        rows: usize,
    ) -> Result<Tensor<'s>, KernelError> {
        scope.empty_f32([rows, self.projection.rows()])
    }

    /// Computes logits from `output` `[logit_rows, hidden]`, which [`forward`](Self::forward) wrote.
    pub fn project<'s, B: Backend>(
        &'s self,
        scope: &Scope<'_, B>,
        output: &Tensor<'_>,
        mut logits: Tensor<'s>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        if output.rows() > 0 {
            let scope = scope.scope();
            let normed = scope.rms_norm(output, self.config.layer.norm(&self.norm))?;
            scope.linear_into(&normed, &self.projection, None, &mut logits)?;
        }
        Ok(DraftLogits {
            logits: logits.into_column_range(0..self.config.vocabulary),
            columns: self
                .ids
                .as_ref()
                .map_or(DraftColumns::Whole, |ids| DraftColumns::Reduced(ids.row_range(0..ids.rows()))),
        })
    }
}

/// The input of an EAGLE-3 head, which is computed while the decoder's layers run: the sum of the
/// products of `fc`, one for each layer that the head reads.
pub struct LayerInputs<'a, 'm> {
    head: &'a Eagle3Head,
    /// `[tokens, hidden]` of the head.
    out: &'a mut Tensor<'m>,
    /// Number of the layers that have been read.
    count: usize,
}

impl<'a, 'm> LayerInputs<'a, 'm> {
    pub fn new(head: &'a Eagle3Head, out: &'a mut Tensor<'m>) -> Self {
        LayerInputs { head, out, count: 0 }
    }

    /// Reads `rows` `[tokens, decoder's hidden]`, the input of decoder layer `layer`, if the head
    /// reads that layer.
    pub fn read<B: Backend>(
        &mut self,
        scope: &Scope<'_, B>,
        layer: usize,
        rows: &Tensor<'_>,
    ) -> Result<(), KernelError> {
        if self.head.config.layers_read.get(self.count) == Some(&layer) {
            self.add(scope, rows)?;
        }
        Ok(())
    }

    /// Uses `rows` as the input of the layers that did not run, because a step may run fewer layers
    /// than the decoder has.
    pub fn finish<B: Backend>(mut self, scope: &Scope<'_, B>, rows: &Tensor<'_>) -> Result<(), KernelError> {
        while self.count < self.head.fc.len() {
            self.add(scope, rows)?;
        }
        Ok(())
    }

    fn add<B: Backend>(&mut self, scope: &Scope<'_, B>, rows: &Tensor<'_>) -> Result<(), KernelError> {
        let weight = &self.head.fc[self.count];
        let mut out = self.out.row_range_mut(0..rows.rows());
        match self.count {
            0 => scope.linear_into(rows, weight, None, &mut out)?,
            _ => scope.linear_add(rows, weight, None, &mut out)?,
        }
        self.count += 1;
        Ok(())
    }
}
