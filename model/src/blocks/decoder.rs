//! A decoder of equal layers, as in Llama, Qwen2 and Qwen3: embeddings in, logits out.

use bursar_kernels::{
    ActivationFormat, ActivationScratch, Activations, Backend, DType, KernelError, KvLayer, KvShape, Scope, Tensor,
    ops::{rms_norm::RmsNorm, rotary::Rope},
};

use super::{
    decoder_config::DecoderConfig,
    decoder_share::DecoderShare,
    gated_mlp::GatedMlp,
    mixture::{Mixture, MixtureConfig},
    paged_attention::{HeadNorms, PagedAttention},
    step_inputs::StepInputs,
    vision::EmbeddingLayout,
};
use crate::{
    flow::{LogitsOf, SCORE_ROWS, StepBatch, StepLayout},
    weights::{WeightError, WeightMap},
};

impl DecoderConfig {
    /// Claims the counters of expert choices. Returns the whole tensor, and one row of it for each
    /// layer that has experts.
    fn loads(
        &self,
        map: &mut WeightMap<'_>,
    ) -> (Option<Tensor<'static>>, impl Iterator<Item = Tensor<'static>> + use<>) {
        let layers = |mixture: &MixtureConfig| (0..self.layers).filter(|layer| mixture.is_in(*layer)).count();
        let claimed = self.mixture.as_ref().map(|mixture| map.counters(layers(mixture), mixture.experts));
        let (all, of_layers) = claimed.unzip();
        (all, of_layers.into_iter().flatten())
    }
}

/// One rank's shard of a decoder's weights.
pub struct Decoder {
    config: DecoderConfig,
    share: DecoderShare,
    embedding: Tensor<'static>, // [own tokens, hidden], padded if it is also the head
    layers: Vec<Layer>,
    loads: Option<Tensor<'static>>,      // [layers with experts, experts] u32
    norm: Tensor<'static>,               // [hidden]
    projection: Option<Tensor<'static>>, // [padded own tokens, hidden]; `None` if tied
    rope: Rope<'static>,
}

struct Layer {
    attention_norm: Tensor<'static>, // [hidden]
    attention: PagedAttention,
    mlp_norm: Tensor<'static>, // [hidden]
    mlp: Mlp,
}

enum Mlp {
    Gated(GatedMlp),
    Mixture(Mixture),
}

/// Values that one layer passes to the next.
struct Stream<'s> {
    hidden: Tensor<'s>,             // [tokens, hidden]
    scratch: ActivationScratch<'s>, // space for one normalized copy of `hidden`
    is_normed: bool,                // `scratch` already has the normalized input of the next layer
}

/// Arguments that are the same for all layers of a step.
struct LayerPass<'a> {
    config: &'a DecoderConfig,
    rope: &'a Rope<'static>,
    inputs: &'a StepInputs<'a>,
}

/// Results of earlier passes that a step reads. The step also writes its keys
/// and values to `layers`.
pub struct StepCaches<'a> {
    /// Keys and values, one entry per layer. A step runs only the first layers, as many
    /// as there are entries.
    pub layers: &'a [KvLayer],
    /// `[rows, width]`: the vision cache, with rows as in [`EmbeddingLayout`]. The number of
    /// DeepStack parts in a row follows from `width`.
    pub pictures: Option<&'a Tensor<'a>>,
    /// `[rows]` u32: the tokens that the previous step sampled, one per row of its logits. Tokens
    /// that the host has not seen yet are read from here; see [`StepBatch::tokens`].
    pub previous: &'a Tensor<'a>,
}

impl Decoder {
    /// Claims the decoder's weights: `lm_head.weight`, and all other weights under `prefix`
    /// followed by a dot. `prefix` is `model` for most checkpoints.
    pub fn claim(config: DecoderConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        Decoder::claim_with_head(config, prefix, "lm_head.weight", map)
    }

    /// Like [`claim`](Self::claim), with `head` as the name of the output projection.
    pub fn claim_with_head(
        config: DecoderConfig,
        prefix: &str,
        head: &str,
        map: &mut WeightMap<'_>,
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let embedding_name = name("embed_tokens.weight");
        let share = config.share(map.rank())?;
        // All ranks have the same number of rows of the head, so that their logits can be gathered
        // as columns of equal width.
        let (tokens, rows) = (share.vocabulary, share.tokens_of_each());
        let embedding = if config.tied_embeddings {
            map.vocabulary(&embedding_name, tokens, rows, config.hidden)?
        } else {
            map.table(&embedding_name, tokens, config.hidden)?
        };
        let (loads, mut of_layers) = config.loads(map);
        map.set_in_decoder(true);
        let layer =
            |index| Layer::claim(&config, &share, index, &name(&format!("layers.{index}")), map, &mut of_layers);
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        map.set_in_decoder(false);
        let norm = map.tensor(&name("norm.weight"), [config.hidden])?;
        let projection = if config.tied_embeddings {
            // Some tools also save a tied head as a separate tensor, which equals the embedding.
            map.twin(head, &embedding_name);
            None
        } else {
            Some(map.vocabulary(head, tokens, rows, config.hidden)?)
        };
        let frequencies = map.constant(&config.rope_scaling.frequencies(config.rope_theta, config.head_dim));
        let rope = Rope { frequencies, axes: config.rope_axes.clone() };
        Ok(Decoder { config, share, embedding, layers, loads, norm, projection, rope })
    }

    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// This rank's shard of the decoder.
    pub fn share(&self) -> &DecoderShare {
        &self.share
    }

    /// The shape of this rank's keys and values, with elements of type `dtype`.
    pub fn kv_shape(&self, dtype: DType) -> KvShape {
        let DecoderConfig { layers, head_dim, .. } = self.config;
        KvShape { layers, kv_heads: self.share.kv_heads.count, head_dim, dtype }
    }

    /// Number of times that each expert was chosen since the weights were loaded,
    /// `[layers with experts, experts]` u32. The counters wrap around on overflow. `None` for a
    /// decoder without experts. Padding rows of a captured step are not counted.
    pub fn expert_loads(&self) -> Option<&Tensor<'static>> {
        self.loads.as_ref()
    }

    /// Runs one step and returns the logits of the batch's logit rows: `[logit_rows, vocabulary]`
    /// f32 on every target, or only this rank's columns. The tensor may have gaps between its rows.
    /// The tensor has no rows if the batch has no logit rows. `score` is called with the logits of
    /// the scored rows, gathered from all ranks, at most [`SCORE_ROWS`] rows at a time: the logits
    /// of a whole prompt would take gigabytes.
    pub fn step<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        mut score: impl FnMut(&Scope<'_, B>, &Tensor<'_>) -> Result<(), KernelError>,
    ) -> Result<Tensor<'s>, KernelError> {
        let logits = self.empty_logits(scope, batch.logit_rows.len(), of)?;
        let inner = scope.scope();
        let (layout, mut words) = (self.layout(batch), Vec::new());
        layout.pack(batch, &mut words);
        let step_arrays = inner.upload([layout.words()], &words)?;
        let inputs = StepInputs::over(&step_arrays, &layout);
        let chosen = self.run(&inner, &inputs, caches)?; // [logit_rows + score_rows, hidden]
        let logits = self.project(&inner, &chosen.row_range(0..layout.logit_rows), of, logits)?;
        for first in (layout.logit_rows..chosen.rows()).step_by(SCORE_ROWS) {
            let rows = chosen.row_range(first..chosen.rows().min(first + SCORE_ROWS));
            let inner = inner.scope();
            let scored = self.empty_logits(&inner, rows.rows(), LogitsOf::AllRanks)?;
            let scored = self.project(&inner, &rows, LogitsOf::AllRanks, scored)?;
            score(&inner, &scored)?;
        }
        Ok(logits)
    }

    /// The step layout of exactly the size of `batch`, for this decoder.
    pub fn layout(&self, batch: &StepBatch) -> StepLayout {
        StepLayout::of(batch, self.config.rope_axes.count())
    }

    /// Launches a step without uploading anything and without scoring. The step's arrays are in
    /// `step_arrays` at the offsets of `layout`, or will be there when a CUDA graph of the step is
    /// replayed. Returns `[logit_rows, vocabulary]` f32, or only this rank's columns, possibly
    /// with gaps between rows.
    pub fn step_over<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        step_arrays: &Tensor<'_>, // [words] u32
        layout: &StepLayout,
        caches: &StepCaches<'_>,
        of: LogitsOf,
    ) -> Result<Tensor<'s>, KernelError> {
        let logits = self.empty_logits(scope, layout.logit_rows, of)?;
        let inner = scope.scope();
        let inputs = StepInputs::over(step_arrays, layout);
        let chosen = self.run(&inner, &inputs, caches)?;
        self.project(&inner, &chosen, of, logits)
    }

    /// Runs all layers and returns the rows for which a token is sampled or scored,
    /// `[logit_rows + score_rows, hidden]`. The other rows are read only by the attention of later
    /// tokens, so the last layer computes only their keys and values. For a prompt and the shape of
    /// a 7B model, this saves one thirtieth of the work.
    fn run<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let pass = LayerPass { config: &self.config, rope: &self.rope, inputs };
        // The chosen rows are allocated before the layers run, and the last layer runs on only the
        // chosen rows if they are at most half of all rows. Therefore no step uses more memory than
        // a step that scores every row, and sizing measures such a step. The cost is 57 MiB less KV
        // cache for the shape of a 7B model and 8,192 tokens per step.
        let chosen = match &inputs.chosen_rows {
            Some(rows) => Some((rows, scope.empty([rows.rows(), self.config.hidden])?)),
            None => None,
        };
        let hidden = self.embed(scope, inputs, caches)?;
        let formats = self.layers.iter().flat_map(Layer::norm_formats);
        let scratch = scope.activation_scratch(formats, hidden.rows(), self.config.hidden)?;
        let mut stream = Stream { hidden, scratch, is_normed: false };
        let ends_early = chosen.as_ref().is_some_and(|(rows, _)| 2 * rows.rows() <= stream.hidden.rows());
        let mut layers = self.layers.iter().zip(caches.layers);
        // Picture parts (DeepStack) are added to the full set of rows, so a layer that is followed
        // by such a part must run on all rows.
        let whole = layers.len().saturating_sub(usize::from(ends_early && layers.len() > self.parts(caches)));
        for (index, (layer, cache)) in layers.by_ref().take(whole).enumerate() {
            let is_followed = index + 1 < caches.layers.len() && !self.has_picture_part(index, inputs, caches);
            let next = self.layers.get(index + 1).filter(|_| is_followed);
            layer.forward(scope, &pass, cache, &mut stream, next)?;
            self.add_picture_part(scope, index, inputs, caches, &mut stream.hidden)?;
        }
        let Some((rows, mut chosen)) = chosen else { return Ok(stream.hidden) };
        match layers.next() {
            Some((last, cache)) => last.forward_chosen(scope, &pass, cache, &mut stream, rows, &mut chosen)?,
            None => scope.gather_rows_into(&stream.hidden, rows, &mut chosen)?,
        }
        Ok(chosen)
    }

    /// The output projection, `[padded own tokens, hidden]`.
    fn head(&self) -> &Tensor<'static> {
        self.projection.as_ref().unwrap_or(&self.embedding)
    }

    /// Whether this rank's head computes all the logits that `of` asks for, so
    /// that nothing is gathered.
    fn has_own<B: Backend>(&self, scope: &Scope<'_, B>, of: LogitsOf) -> bool {
        self.share.rank.is_alone() || of == LogitsOf::OwnRank && scope.chooses_among_ranks()
    }

    /// Allocates the logits of `rows` rows, including padding columns, `[rows, padded tokens]`.
    fn empty_logits<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        rows: usize,
        of: LogitsOf,
    ) -> Result<Tensor<'s>, KernelError> {
        let columns = if self.has_own(scope, of) {
            self.head().rows()
        } else {
            self.share.rank.of() * self.share.tokens_of_each()
        };
        scope.empty_f32([rows, columns])
    }

    /// Writes the logits of `chosen` `[rows, hidden]` to `logits`, and returns the logits
    /// without padding columns: `[rows, vocabulary]` or `[rows, own tokens]`, possibly
    /// with gaps between rows.
    fn project<'s, B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        chosen: &Tensor<'_>,
        of: LogitsOf,
        mut logits: Tensor<'s>, // [rows, padded tokens]
    ) -> Result<Tensor<'s>, KernelError> {
        if chosen.rows() > 0 {
            let scope = scope.scope();
            let normed = scope.rms_norm(chosen, &self.norm, self.config.norm_epsilon)?;
            if self.has_own(&scope, of) {
                scope.linear_into(&normed, self.head(), None, &mut logits)?;
            } else {
                let mut own = scope.empty_f32([chosen.rows(), self.head().rows()])?;
                scope.linear_into(&normed, self.head(), None, &mut own)?;
                scope.all_gather_into(&own.column_range(0..self.share.tokens_of_each()), &mut logits)?;
            }
        }
        let tokens = if self.has_own(scope, of) { self.share.vocabulary.count } else { self.config.vocabulary };
        Ok(logits.into_column_range(0..tokens))
    }

    /// Embeds the tokens, `[tokens, hidden]`, and replaces the placeholders
    /// with the pictures' embeddings.
    fn embed<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let table = self.embedding.row_range(0..self.share.vocabulary.count);
        let mut hidden = if self.share.rank.is_alone() {
            scope.embed(&table, &inputs.tokens, caches.previous)?
        } else {
            let mut hidden = scope.empty([inputs.tokens.rows(), self.config.hidden])?;
            let inner = scope.scope();
            let own = inner.embed_share(&table, self.share.vocabulary, &inputs.tokens, caches.previous)?;
            inner.all_reduce_into(&own, &mut hidden)?;
            hidden
        };
        if let (Some(pictures), 1..) = (caches.pictures, inputs.picture_rows.rows()) {
            let merge = scope.scope();
            let embeddings = pictures.column_range(EmbeddingLayout::plain(self.config.hidden).embedding());
            let rows = merge.gather_rows(&embeddings, &inputs.picture_cache_rows)?; // [picture_rows, hidden]
            merge.scatter_rows(&rows, &inputs.picture_rows, &mut hidden)?;
        }
        Ok(hidden)
    }

    /// Number of DeepStack parts after the embedding in a row of the vision cache; 0 in a
    /// step without that cache.
    fn parts(&self, caches: &StepCaches<'_>) -> usize {
        caches.pictures.map_or(0, |pictures| EmbeddingLayout::of_width(pictures.columns(), self.config.hidden).parts)
    }

    /// Whether the step has pictures with a DeepStack part that is added after layer `layer`.
    fn has_picture_part(&self, layer: usize, inputs: &StepInputs<'_>, caches: &StepCaches<'_>) -> bool {
        inputs.picture_rows.rows() > 0 && layer < self.parts(caches)
    }

    /// Adds the DeepStack part for layer `layer`, if there is one, to the rows of picture
    /// tokens in `hidden` `[tokens, hidden]`.
    fn add_picture_part<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        layer: usize,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let Some(pictures) = caches.pictures.filter(|_| self.has_picture_part(layer, inputs, caches)) else {
            return Ok(());
        };
        let row = EmbeddingLayout::of_width(pictures.columns(), self.config.hidden);
        let part = pictures.column_range(row.part(layer));
        scope.add_rows(&part, &inputs.picture_cache_rows, &inputs.picture_rows, hidden)
    }
}

impl Layer {
    fn claim(
        config: &DecoderConfig,
        share: &DecoderShare,
        index: usize,
        prefix: &str,
        map: &mut WeightMap<'_>,
        loads: &mut impl Iterator<Item = Tensor<'static>>,
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, head_dim, biases) = (config.hidden, config.head_dim, config.biases);
        let (query_rows, kv_rows) = (share.heads.times(head_dim), share.kv_heads.times(head_dim));
        let [query, key, value] = ["q", "k", "v"].map(|part| name(&format!("self_attn.{part}_proj")));
        Ok(Layer {
            attention_norm: map.tensor(&name("input_layernorm.weight"), [hidden])?,
            attention: PagedAttention {
                qkv: map.fused_linear(
                    &[(&query, query_rows), (&key, kv_rows), (&value, kv_rows)],
                    hidden,
                    biases.qkv,
                )?,
                norms: if config.head_norms {
                    Some(HeadNorms {
                        query: map.tensor(&name("self_attn.q_norm.weight"), [head_dim])?,
                        key: map.tensor(&name("self_attn.k_norm.weight"), [head_dim])?,
                        epsilon: config.norm_epsilon,
                    })
                } else {
                    None
                },
                cache_scales: map.cache_scales(&name("self_attn"), share.kv_heads)?,
                out: map.linear(&name("self_attn.o_proj"), hidden, query_rows, biases.out)?,
                heads: share.heads.count,
                scale: (head_dim as f32).powf(-0.5) * config.rope_scaling.score_factor(),
            },
            mlp_norm: map.tensor(&name("post_attention_layernorm.weight"), [hidden])?,
            mlp: match config.mixture.as_ref().filter(|mixture| mixture.is_in(index)) {
                Some(mixture) => {
                    let loads = loads.next().expect("each layer with experts has a list");
                    let held = share.experts.expect("it has experts");
                    Mlp::Mixture(Mixture::claim(map, &name("mlp"), hidden, mixture, held, loads)?)
                }
                None => Mlp::Gated(GatedMlp::claim(
                    map,
                    ["gate", "up", "down"].map(|part| name(&format!("mlp.{part}_proj"))).each_ref().map(String::as_str),
                    (hidden, share.intermediate),
                    biases.mlp,
                )?),
            },
        })
    }

    /// The formats of the two normalized inputs: of attention and of the MLP.
    fn norm_formats(&self) -> [ActivationFormat; 2] {
        let of_mlp = match &self.mlp {
            Mlp::Gated(mlp) => mlp.reads(),
            Mlp::Mixture(mixture) => mixture.reads(),
        };
        [self.attention.qkv.reads(), of_mlp]
    }

    /// Runs the layer on all rows of `stream`, in place. `next` is the following layer, or `None`
    /// if there is no such layer or if a DeepStack part is added to the rows first. If `next` is
    /// given, this function may also compute the normalized input of `next`.
    fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        cache: &KvLayer,
        stream: &mut Stream<'_>,
        next: Option<&Layer>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = stream.normed(&scope, pass, self)?;
            let qkv = self.attention.project(&scope, &normed, pass.rope, pass.inputs, cache)?;
            let attended = self.attention.attend(&scope, &qkv, pass.inputs, cache)?;
            self.add_attended(&scope, pass, &attended, (&mut stream.hidden, &mut stream.scratch))?;
        }
        stream.is_normed = self.add_mlp(scope, pass, (&mut stream.hidden, &mut stream.scratch), next)?;
        Ok(())
    }

    /// Like [`forward`](Layer::forward), but computes only the rows `rows` of `stream`, and writes
    /// the result to `chosen` `[rows, hidden]`. The keys and values of all rows are still written.
    fn forward_chosen<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        cache: &KvLayer,
        stream: &mut Stream<'_>,
        rows: &Tensor<'_>, // [rows] u32
        chosen: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = stream.normed(&scope, pass, self)?;
            let qkv = self.attention.project(&scope, &normed, pass.rope, pass.inputs, cache)?;
            if rows.rows() == 0 {
                return Ok(());
            }
            let attended = self.attention.attend(&scope, &qkv, pass.inputs, cache)?;
            // Nothing reads `qkv` after this point, so the chosen rows overwrite it.
            let (all, wanted) = (qkv.shape().elements(), [rows.rows(), attended.columns()]);
            let mut place = qkv.into_shape([1, all]);
            let mut few = place.column_range_mut(0..wanted[0] * wanted[1]).into_shape(wanted);
            scope.gather_rows_into(&attended, rows, &mut few)?;
            scope.gather_rows_into(&stream.hidden, rows, chosen)?;
            self.add_attended(&scope, pass, &few, (chosen, &mut stream.scratch))?;
        }
        self.add_mlp(scope, pass, (chosen, &mut stream.scratch), None)?;
        Ok(())
    }

    /// Projects `attended` `[rows, heads * head_dim]` and adds the result to `hidden`
    /// `[rows, hidden]`. For a gated MLP, the normalized input of the MLP is left in `scratch`. If
    /// the ranks' partial results are summed, the sum operation also computes the norm, because
    /// that operation has complete rows. A mixture computes its own norm together with its routing.
    fn add_attended<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        attended: &Tensor<'_>,
        (hidden, scratch): (&mut Tensor<'_>, &mut ActivationScratch<'_>),
    ) -> Result<(), KernelError> {
        let ([_, format], norm, out) = (self.norm_formats(), pass.norm(&self.mlp_norm), &self.attention.out);
        if let Mlp::Mixture(_) = &self.mlp {
            return out.forward_add(scope, attended, hidden);
        }
        // Nothing reads the previous norm in `scratch` any more, so it is overwritten.
        let mut normed = scratch.place(format, hidden.rows());
        if out.is_partial {
            return out.forward_add_normed(scope, attended, hidden, norm, &mut normed);
        }
        out.forward_add(scope, attended, hidden)?;
        scope.rms_norm_into(hidden, norm, &mut normed)
    }

    /// Runs the MLP and adds its result to `hidden` `[rows, hidden]`. `scratch` must be as
    /// [`add_attended`](Layer::add_attended) left it. Returns `true` if `scratch` contains the
    /// normalized input of `next` afterwards. The operations that sum the experts or the ranks'
    /// partial results also compute that input.
    fn add_mlp<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        (hidden, scratch): (&mut Tensor<'_>, &mut ActivationScratch<'_>),
        next: Option<&Layer>,
    ) -> Result<bool, KernelError> {
        let scope = scope.scope();
        let ([_, format], rows) = (self.norm_formats(), hidden.rows());
        let mut normed = scratch.place(format, rows);
        match &self.mlp {
            Mlp::Gated(mlp) => {
                let gated = mlp.gate(&scope, &normed)?;
                let Some(next) = next.filter(|_| mlp.down.is_partial) else {
                    return mlp.down.forward_add(&scope, &gated, hidden).map(|()| false);
                };
                let mut normed = scratch.place(next.attention.qkv.reads(), rows);
                let norm = pass.norm(&next.attention_norm);
                mlp.down.forward_add_normed(&scope, &gated, hidden, norm, &mut normed)?;
                Ok(true)
            }
            Mlp::Mixture(mixture) => {
                // A step that runs its last layer on chosen rows is never captured in a CUDA graph.
                // Such a layer has no padding rows, so the router does not need the slots to
                // recognize them.
                let slots = Some(&pass.inputs.slots).filter(|slots| slots.rows() == rows);
                let gated = mixture.gate(&scope, hidden, pass.norm(&self.mlp_norm), &mut normed, slots)?;
                let Some(next) = next else {
                    return mixture.add(&scope, &gated, hidden, None).map(|()| false);
                };
                // Nothing reads `scratch` after the experts' first half, so its content is
                // overwritten.
                let mut normed = scratch.place(next.attention.qkv.reads(), rows);
                let norm = pass.norm(&next.attention_norm);
                mixture.add(&scope, &gated, hidden, Some((norm, &mut normed)))?;
                Ok(true)
            }
        }
    }
}

impl LayerPass<'_> {
    fn norm<'n>(&self, weight: &'n Tensor<'static>) -> RmsNorm<'n> {
        RmsNorm { weight, epsilon: self.config.norm_epsilon }
    }
}

impl Stream<'_> {
    /// Returns the normalized input of `layer`. The input is computed here unless the previous
    /// layer has already left it in `scratch`.
    fn normed<B: Backend>(
        &mut self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        layer: &Layer,
    ) -> Result<Activations<'_>, KernelError> {
        let mut normed = self.scratch.place(layer.attention.qkv.reads(), self.hidden.rows());
        if !std::mem::take(&mut self.is_normed) {
            scope.rms_norm_into(&self.hidden, pass.norm(&layer.attention_norm), &mut normed)?;
        }
        Ok(normed)
    }
}
