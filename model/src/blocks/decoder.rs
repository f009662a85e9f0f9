//! A decoder, as in Llama, Qwen and Gemma: embeddings in, logits out.

mod logits;

use bursar_budgets::Bytes;
use bursar_kernels::{
    Activations, Backend, DType, KernelError, KvShape, RankShard, Scope, StateDtype, StateShape, Tensor, Weight,
    ops::rms_norm::RmsNorm,
};

use super::{
    decoder_config::{DecoderConfig, DraftHeadConfig},
    decoder_share::{DecoderShare, KvHeads},
    draft_head::{self, DraftColumns, DraftHead, DraftLogits, DraftResults, DraftRows, LayerInputs},
    layer::{Layer, LayerPass, Stream},
    layer_cache::LayerCache,
    mixture::MixtureConfig,
    per_layer_embeddings::PerLayerEmbeddings,
    ropes::Ropes,
    step_inputs::StepInputs,
    vision::EmbeddingLayout,
};
use crate::{
    checkpoint::DRAFT_MODEL,
    flow::{CacheGroups, LogitsOf, SCORE_ROWS, StepBatch, StepFormat, StepLayout},
    weights::{WeightError, WeightMap},
};

impl DecoderConfig {
    /// Claims the counters of expert choices. Returns the whole tensor, and one row of it for each
    /// layer that has experts. The layer of Qwen3.5's draft head is the last, if it is loaded.
    fn loads(
        &self,
        map: &mut WeightMap<'_>,
    ) -> (Option<Tensor<'static>>, impl Iterator<Item = Tensor<'static>> + use<>) {
        let of_head = match self.draft_head {
            Some(DraftHeadConfig::Mtp { layers, .. }) => layers,
            Some(DraftHeadConfig::Eagle3(_) | DraftHeadConfig::Assistant(_)) | None => 0,
        };
        let layers = |mixture: &MixtureConfig| (0..self.layers + of_head).filter(|layer| mixture.is_in(*layer)).count();
        let claimed = self.mixture.as_ref().map(|mixture| map.counters(layers(mixture), mixture.experts));
        let (all, of_layers) = claimed.unzip();
        (all, of_layers.into_iter().flatten())
    }
}

/// One rank's shard of a decoder's weights.
pub struct Decoder {
    config: DecoderConfig,
    groups: CacheGroups,
    format: StepFormat,
    share: DecoderShare,
    embedding: Weight<'static>, // [own tokens, hidden], padded if it is also the head
    per_layer_embeddings: Option<PerLayerEmbeddings>,
    layers: Vec<Layer>,
    loads: Option<Tensor<'static>>,      // [layers with experts, experts] u32
    norm: Tensor<'static>,               // [hidden]
    projection: Option<Weight<'static>>, // [padded own tokens, hidden]; `None` if tied
    ropes: Ropes,
    draft_head: Option<DraftHead>,
    /// A copy of the output projection in 4-bit integers, which only a draft head of the model's own
    /// checkpoint uses.
    draft_projection: Option<Weight<'static>>, // [padded own tokens, hidden]
    draft_bytes: Bytes, // of the draft head's weights
}

/// Results of earlier passes that a step reads. The step also writes its keys, values and states to
/// `layers`.
pub struct StepCaches<'a> {
    /// The cache of each layer, followed by the cache of the draft head's layer if the head is
    /// loaded. If there are fewer entries than decoder layers, a step runs only that many layers.
    pub layers: &'a [LayerCache],
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
        // All ranks have the same number of rows of the output projection, so that their logits can
        // be gathered as columns of equal width.
        let (tokens, rows) = (share.vocabulary, share.tokens_of_each());
        let embedding = if config.tied_embeddings {
            map.vocabulary(&embedding_name, tokens, rows, config.hidden)?
        } else {
            map.table(&embedding_name, tokens, config.hidden)?
        };
        let of_layers = config.per_layer_embeddings;
        let of_layers = of_layers.map(|of_layers| PerLayerEmbeddings::claim(map, prefix, &config, of_layers, &share));
        let per_layer_embeddings = of_layers.transpose()?;
        let (loads, mut of_layers) = config.loads(map);
        map.set_in_decoder(true);
        let layer =
            |index| Layer::claim(&config, &share, index, &name(&format!("layers.{index}")), map, &mut of_layers);
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        map.set_in_decoder(false);
        let norm = map.tensor(&name("norm.weight"), [config.hidden])?;
        let projection = if config.tied_embeddings {
            // Some tools also save a tied output projection as a separate tensor, which equals the
            // embedding.
            map.allow_tied(head, &embedding_name);
            None
        } else {
            Some(map.vocabulary(head, tokens, rows, config.hidden)?)
        };
        let ropes = Ropes::claim(&config, map);
        let bytes_before = map.used();
        let draft_head = DraftHead::claim(&config, &share, prefix, map, &mut of_layers)?;
        let projection_name = if config.tied_embeddings { &embedding_name } else { head };
        let draft_projection = if let Some(DraftHead::Mtp(_)) = &draft_head {
            map.draft_projection(projection_name, tokens, rows, config.hidden)?
        } else {
            if config.gated_delta.is_some() {
                map.leave_unread(draft_head::MODULE);
            }
            None
        };
        if !matches!(draft_head, Some(DraftHead::Eagle3(_) | DraftHead::Assistant(_))) {
            map.leave_unread(DRAFT_MODEL);
        }
        let (groups, format) = (config.cache_groups(), config.step_format());
        Ok(Decoder {
            config,
            groups,
            format,
            share,
            embedding,
            per_layer_embeddings,
            layers,
            loads,
            norm,
            projection,
            ropes,
            draft_head,
            draft_projection,
            draft_bytes: map.used().saturating_sub(bytes_before),
        })
    }

    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The arguments of layer `layer` in a step. `embeddings` are the per-layer embeddings, if the
    /// model has them.
    fn pass<'a>(
        &'a self,
        layer: usize,
        inputs: &'a StepInputs<'a>,
        embeddings: Option<&'a Tensor<'a>>,
    ) -> LayerPass<'a> {
        LayerPass { config: &self.config, rope: self.ropes.of(&self.config, layer), inputs, embeddings }
    }

    /// This rank's shard of the decoder.
    pub fn share(&self) -> &DecoderShare {
        &self.share
    }

    /// The attention layers, in groups that share block tables.
    pub fn cache_groups(&self) -> &CacheGroups {
        &self.groups
    }

    /// The shape of this rank's blocks of keys and values, with elements of type `dtype`. `layers`
    /// counts the segments of a block, and `kv_heads` the heads of all sliding-window layers in one
    /// segment.
    pub fn kv_shape(&self, dtype: DType) -> KvShape {
        let (layers, head_dim) = (self.groups.segments(), self.config.head_dim);
        let kv_heads = self.groups.segment_layers().windowed * self.share.kv_heads.count;
        KvShape { layers, kv_heads, head_dim, dtype }
    }

    /// This rank's heads of a layer.
    pub fn attention(&self, layer: usize) -> KvHeads {
        self.share.attention(&self.config, layer)
    }

    /// The shape of this rank's recurrent states, with convolution inputs of type `activation`.
    /// `None` if all layers are attention.
    pub fn state_shape(&self, activation: DType, state_dtype: StateDtype) -> Option<StateShape> {
        let (delta, heads) = self.config.gated_delta.as_ref().zip(self.share.delta)?;
        let layers = self.config.layers - self.config.attention_layers();
        Some(StateShape { state_dtype, ..delta.state_shape(heads, layers, activation) })
    }

    /// Bytes of the draft head's weights; 0 without a draft head.
    pub fn draft_bytes(&self) -> Bytes {
        self.draft_bytes
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
    ///
    /// If `hidden` `[draft rows, draft width]` is given, it receives the rows that the draft head reads;
    /// see [`DraftMemory::hidden`](super::draft_head::DraftMemory::hidden). Qwen3.5's head reads all
    /// rows after the final norm, so the last layer then runs on all rows.
    pub fn step<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        hidden: Option<&mut Tensor<'_>>,
        mut score: impl FnMut(&Scope<'_, B>, &Tensor<'_>) -> Result<(), KernelError>,
    ) -> Result<Tensor<'s>, KernelError> {
        let logits = self.empty_logits(scope, batch.logit_rows.len(), of)?;
        let inner = scope.scope();
        let (layout, mut words) = (self.layout(batch), Vec::new());
        layout.pack(batch, &mut words);
        let step_arrays = inner.upload([layout.words()], &words)?;
        let inputs = StepInputs::over(&step_arrays, &layout);
        let hidden = hidden.map(|hidden| (hidden, layout.logit_rows));
        let (chosen, norm) = self.chosen(&inner, &inputs, caches, hidden)?; // [logit_rows + score_rows, hidden]
        let logits = self.project(self.head(), &inner, &chosen.row_range(0..layout.logit_rows), norm, of, logits)?;
        for first in (layout.logit_rows..chosen.rows()).step_by(SCORE_ROWS) {
            let rows = chosen.row_range(first..chosen.rows().min(first + SCORE_ROWS));
            let inner = inner.scope();
            let scored = self.empty_logits(&inner, rows.rows(), LogitsOf::AllRanks)?;
            let scored = self.project(self.head(), &inner, &rows, norm, LogitsOf::AllRanks, scored)?;
            score(&inner, &scored)?;
        }
        Ok(logits)
    }

    /// The step layout of exactly the size of `batch`, for this decoder.
    pub fn layout(&self, batch: &StepBatch) -> StepLayout {
        StepLayout::of(batch, self.format)
    }

    /// Launches a step without uploading anything and without scoring. The step's arrays are in
    /// `step_arrays` at the offsets of `layout`, or will be there when a CUDA graph of the step is
    /// replayed. Returns `[logit_rows, vocabulary]` f32, or only this rank's columns, possibly
    /// with gaps between rows. `hidden`: see [`step`](Self::step).
    pub fn step_over<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        step_arrays: &Tensor<'_>, // [words] u32
        layout: &StepLayout,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        hidden: Option<&mut Tensor<'_>>, // [draft rows, draft width]
    ) -> Result<Tensor<'s>, KernelError> {
        let logits = self.empty_logits(scope, layout.logit_rows, of)?;
        let inner = scope.scope();
        let inputs = StepInputs::over(step_arrays, layout);
        let hidden = hidden.map(|hidden| (hidden, layout.logit_rows));
        let (chosen, norm) = self.chosen(&inner, &inputs, caches, hidden)?;
        self.project(self.head(), &inner, &chosen, norm, of, logits)
    }

    /// Runs the draft head after a step over `batch`. `batch` must have the
    /// [inputs](StepBatch::pack_with_drafts) of a draft head. Returns, for each logit row of the
    /// step, the logits of the token after the chosen token. `caches.previous` has the tokens that
    /// the step chose, and `caches.layers` has the caches of all layers.
    ///
    /// For a further draft, `batch` ([`FurtherDrafts::batch`](crate::flow::FurtherDrafts::batch)) has one
    /// row per sequence, and `caches.previous` has the drafted tokens.
    ///
    /// # Panics
    /// If the decoder has no draft head, or the batch has no inputs for it.
    pub fn draft<'s, B: Backend>(
        &'s self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        rows: DraftRows<'_, '_>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        let logits = self.empty_draft_logits(scope, batch.logit_rows.len(), of)?;
        let batch = match self.draft_head() {
            DraftHead::Mtp(_) => batch.draft_pass(),
            // The head reads no pictures, see `draft_into`.
            DraftHead::Eagle3(_) => batch.draft_pass().without_pictures(),
            DraftHead::Assistant(_) => batch.draft_pass_of_logit_rows(),
        };
        let inner = scope.scope();
        let (layout, mut words) = (StepLayout::of(&batch, self.config.draft_format()), Vec::new());
        layout.pack(&batch, &mut words);
        // Sizing measures a pass in which every row is chosen, so such a pass must not use less
        // memory than other passes.
        words.resize(layout.words_with_chosen_rows(), 0);
        let step_arrays = inner.upload([words.len()], &words)?;
        self.draft_into(&inner, &StepInputs::over(&step_arrays, &layout), caches, of, rows, logits)
    }

    /// Like [`draft`](Self::draft), but uploads nothing. `step_arrays` `[words]` u32 and `layout`
    /// are the arrays and the layout of the step, including the inputs of the draft head.
    pub fn draft_over<'s, B: Backend>(
        &'s self,
        scope: &'s Scope<'_, B>,
        step_arrays: &Tensor<'_>,
        layout: &StepLayout,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        rows: DraftRows<'_, '_>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        let logits = self.empty_draft_logits(scope, layout.logit_rows, of)?;
        self.draft_into(&scope.scope(), &StepInputs::of_drafts(step_arrays, layout), caches, of, rows, logits)
    }

    /// # Panics
    /// If the decoder has no draft head.
    fn draft_head(&self) -> &DraftHead {
        self.draft_head.as_ref().expect("the model was loaded with its draft head")
    }

    /// Allocates the results of a pass of the draft head with `rows` drafts. Logits include padding
    /// columns.
    fn empty_draft_logits<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        rows: usize,
        of: LogitsOf,
    ) -> Result<DraftResults<'s>, KernelError> {
        let logits = match self.draft_head() {
            DraftHead::Mtp(_) => self.empty_logits(scope, rows, of)?,
            DraftHead::Eagle3(head) => head.empty_logits(scope, rows)?,
            DraftHead::Assistant(head) => return head.empty_results(scope, rows),
        };
        Ok(DraftResults { logits, normed: None })
    }

    /// Runs the draft head and writes the logits of the logit rows to `logits`.
    fn draft_into<'s, B: Backend>(
        &'s self,
        scope: &Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        rows: DraftRows<'_, '_>,
        results: DraftResults<'s>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        let own_cache = || caches.layers.get(self.config.layers).expect("the draft head has a cache");
        let (DraftResults { logits, .. }, DraftRows { hidden, output }) = (&results, rows);
        let head = match self.draft_head() {
            DraftHead::Mtp(head) => head,
            DraftHead::Assistant(head) => {
                let scope = scope.scope();
                // The token after a row with logits never belongs to a picture.
                let table = (&self.embedding, self.share.vocabulary);
                let embedded = self.embed_tokens(&scope, table, self.config.embedding_scale, inputs, caches)?;
                return head.forward(&scope, inputs, caches.layers, &embedded, DraftRows { hidden, output }, results);
            }
            DraftHead::Eagle3(head) => {
                {
                    let scope = scope.scope();
                    // The head is trained with the embeddings of placeholder tokens, not with
                    // those of pictures.
                    let table = head.embedding().unwrap_or(&self.embedding);
                    let table = (table, self.share.vocabulary);
                    let embedded = self.embed_tokens(&scope, table, 1.0, inputs, caches)?;
                    let rows = DraftRows { hidden, output: &mut *output };
                    head.forward(&scope, inputs, own_cache(), &embedded, rows)?;
                }
                let output = output.row_range(0..logits.rows());
                return head.project(scope, &output, results.logits);
            }
        };
        {
            let scope = scope.scope();
            let mut input = scope.empty([inputs.tokens.rows(), self.config.hidden])?;
            {
                let scope = scope.scope();
                let embedded = self.embed(&scope, inputs, caches)?;
                head.combine(&scope, &self.config, &embedded, hidden, &mut input)?;
            }
            let pass = self.pass(self.config.layers, inputs, None);
            head.forward(&scope, &pass, own_cache(), input, output)?;
        }
        // For many rows, the unrounded weight is faster.
        let is_few = logits.rows() <= scope.target().int4_logit_rows_max();
        let weight = self.draft_projection.as_ref().filter(|_| is_few).unwrap_or(self.head());
        let logits = self.project(weight, scope, &output.row_range(0..logits.rows()), None, of, results.logits)?;
        let vocabulary = self.config.vocabulary;
        let columns = if self.has_own(scope, of) { DraftColumns::OfRanks(vocabulary) } else { DraftColumns::Whole };
        Ok(DraftLogits { logits, columns })
    }

    /// Runs all layers and returns the rows for which a token is sampled or scored,
    /// `[logit_rows + score_rows, hidden]`, and the final norm, if it has not been applied yet. If
    /// `hidden` `[draft rows, draft width]` is given with the number of rows that a token is sampled
    /// for, it receives the rows that the draft head reads.
    fn chosen<'s, B: Backend>(
        &'s self,
        scope: &'s Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
        hidden: Option<(&'s mut Tensor<'_>, usize)>,
    ) -> Result<(Tensor<'s>, Option<RmsNorm<'s>>), KernelError> {
        let norm = self.config.norm(&self.norm);
        let chosen = inputs.chosen_rows.as_ref();
        let hidden = match (hidden, &self.draft_head) {
            (None, _) => return Ok((self.run(scope, inputs, caches, chosen, None)?, Some(norm))),
            (Some((hidden, _)), Some(DraftHead::Eagle3(head))) => {
                let read = LayerInputs::new(head, hidden);
                return Ok((self.run(scope, inputs, caches, chosen, Some(read))?, Some(norm)));
            }
            (Some((hidden, logit_rows)), Some(DraftHead::Assistant(_))) => {
                let rows = self.run(scope, inputs, caches, chosen, None)?;
                if logit_rows > 0 {
                    let mut normed = Activations::of_plain(hidden.row_range_mut(0..logit_rows));
                    scope.rms_norm_into(&rows.row_range(0..logit_rows), norm, &mut normed)?;
                }
                return Ok((rows, Some(norm)));
            }
            (Some((hidden, _)), _) => hidden,
        };
        {
            let scope = scope.scope();
            let rows = self.run(&scope, inputs, caches, None, None)?;
            let mut normed = Activations::of_plain(hidden.row_range_mut(0..rows.rows()));
            scope.rms_norm_into(&rows, norm, &mut normed)?;
        }
        Ok(match &inputs.chosen_rows {
            Some(rows) => (scope.gather_rows(hidden, rows)?, None),
            None => (hidden.row_range(0..inputs.tokens.rows()), None),
        })
    }

    /// Runs all layers and returns the rows `chosen_rows` `[rows]` u32, or all rows if
    /// `chosen_rows` is `None`. `read` receives each layer's input. If at most half of the rows are chosen and no DeepStack part is
    /// added after the last layer, the last layer runs its output projection and its MLP only on
    /// the chosen rows. If no row is chosen, the last layer only writes its cache. For a prompt and
    /// the shape of a 7B model, this saves one thirtieth of the work.
    fn run<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
        chosen_rows: Option<&Tensor<'_>>,
        mut read: Option<LayerInputs<'_, '_>>,
    ) -> Result<Tensor<'s>, KernelError> {
        // The chosen rows are allocated before the layers run, and the last layer runs on only the
        // chosen rows if they are at most half of all rows. Therefore no step uses more memory than
        // a step that scores every row, and sizing measures such a step. The cost is 57 MiB less KV
        // cache for the shape of a 7B model and 8,192 tokens per step.
        let chosen = match chosen_rows {
            Some(rows) => Some((rows, scope.empty([rows.rows(), self.config.hidden])?)),
            None => None,
        };
        let hidden = self.embed(scope, inputs, caches)?;
        let embeddings = match &self.per_layer_embeddings {
            Some(per_layer_embeddings) => {
                let table = (&per_layer_embeddings.table, per_layer_embeddings.tokens);
                let mut rows = self.embed_tokens(scope, table, per_layer_embeddings.table_scale(), inputs, caches)?;
                per_layer_embeddings.combine(scope, &hidden, &mut rows)?;
                Some(rows)
            }
            None => None,
        };
        let embeddings = embeddings.as_ref();
        let formats = self.layers.iter().flat_map(Layer::norm_formats);
        let scratch = scope.activation_scratch(formats, hidden.rows(), self.config.hidden)?;
        let mut stream = Stream { hidden, scratch, is_normed: false };
        let ends_early = chosen.as_ref().is_some_and(|(rows, _)| 2 * rows.rows() <= stream.hidden.rows());
        let mut layers = self.layers.iter().zip(caches.layers);
        // Picture parts (DeepStack) are added to the full set of rows, so a layer that is followed
        // by such a part must run on all rows.
        let whole = layers.len().saturating_sub(usize::from(ends_early && layers.len() > self.parts(caches)));
        for (index, (layer, cache)) in layers.by_ref().take(whole).enumerate() {
            if let Some(read) = &mut read {
                read.read(scope, index, &stream.hidden)?;
            }
            let is_followed = index + 1 < caches.layers.len() && !self.has_picture_part(index, inputs, caches);
            let next = self.layers.get(index + 1).filter(|_| is_followed);
            layer.forward(scope, &self.pass(index, inputs, embeddings), cache, &mut stream, next)?;
            self.add_picture_part(scope, index, inputs, caches, &mut stream.hidden)?;
        }
        if let Some(mut read) = read {
            read.read(scope, whole, &stream.hidden)?;
            read.finish(scope, &stream.hidden)?;
        }
        let Some((rows, mut chosen)) = chosen else { return Ok(stream.hidden) };
        match layers.next() {
            Some((last, cache)) => {
                let pass = self.pass(whole, inputs, embeddings);
                last.forward_chosen(scope, &pass, cache, &mut stream, rows, &mut chosen)?;
            }
            None => scope.gather_rows_into(&stream.hidden, rows, &mut chosen)?,
        }
        Ok(chosen)
    }

    /// Embeds the tokens, `[tokens, hidden]`, and replaces the placeholders
    /// with the pictures' embeddings.
    fn embed<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let scale = self.config.embedding_scale;
        let table = (&self.embedding, self.share.vocabulary);
        let mut hidden = self.embed_tokens(scope, table, scale, inputs, caches)?;
        if let (Some(pictures), 1..) = (caches.pictures, inputs.picture_rows.rows()) {
            let merge = scope.scope();
            let embeddings = pictures.column_range(EmbeddingLayout::plain(self.config.hidden).embedding());
            let rows = merge.gather_rows(&embeddings, &inputs.picture_cache_rows)?; // [picture_rows, hidden]
            merge.scatter_rows(&rows, &inputs.picture_rows, &mut hidden)?;
        }
        Ok(hidden)
    }

    /// Embeds the tokens with `table`, which has the rows of the tokens `own`, multiplied by `scale`.
    /// Returns `[tokens, width]`.
    fn embed_tokens<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        (table, own): (&Weight<'static>, RankShard),
        scale: f32,
        inputs: &StepInputs<'_>,
        caches: &StepCaches<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        if self.share.rank.is_alone() {
            return scope.embed_share(table, own, &inputs.tokens, caches.previous, scale);
        }
        let mut embedded = scope.empty([inputs.tokens.rows(), table.columns()])?;
        let inner = scope.scope();
        let own = inner.embed_share(table, own, &inputs.tokens, caches.previous, scale)?;
        inner.all_reduce_into(&own, &mut embedded)?;
        Ok(embedded)
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
