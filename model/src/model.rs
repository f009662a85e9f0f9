//! A model: the weights of its family in one segment, or a plan of their layout.

use std::{ops::ControlFlow, sync::Arc};

use bursar_budgets::{Bytes, Segment};
use bursar_kernels::{
    Backend, KernelError, KvLayer, KvShape, Quantization, Rank, Scope, StateDtype, StateLayer, StateShape, Target,
    Tensor,
};

use crate::{
    Depth,
    blocks::{
        decoder::StepCaches,
        draft_head::{DraftLogits, DraftRows},
        layer_cache::LayerCache,
        vision::share_out,
    },
    checkpoint::{Checkpoint, WeightFormats, WeightQuantization},
    flow::{CacheFormat, CacheGroups, KvLocation, LogitsOf, ResizedImage, StepBatch, StepLayout},
    load_error::LoadError,
    registry::{EncoderBatch, Family, FamilyConfig},
    weights::{BlockWeights, WeightMap, upload},
};

/// A loaded or planned model. A planned model runs only on [`Plan`](bursar_kernels::Plan).
pub struct Model {
    config: FamilyConfig,
    family: Family,
    quantization: Option<&'static str>,
    /// Whether all quantized weights are dequantized while they load.
    is_dequantized: bool,
    int4_bytes: Bytes,
    cache: CacheFormat,
    state_dtype: StateDtype,
    weight_bytes: Bytes,
    parameters: u64,
    block_weights: Option<BlockWeights>,
    /// The memory of the family's tensors; `None` for a plan.
    segment: Option<Arc<Segment>>,
}

impl Model {
    /// Plans the layout of the checkpoint's weights for `target`. Every name, shape and type is
    /// checked, and the scales of quantized weights are read and checked. No other weight is read,
    /// with one exception: if the configuration ties the output projection to the embedding and the
    /// file has both, the two are compared.
    pub fn plan(checkpoint: &Checkpoint, target: &Target) -> Result<Self, LoadError> {
        Model::plan_rank(checkpoint, target, Rank::ALONE)
    }

    /// Like [`plan`](Self::plan), for the shard of the model that belongs to `rank`.
    ///
    /// # Errors
    /// See [`plan`](Self::plan); [`WeightError::Ranks`](crate::weights::WeightError::Ranks) and
    /// [`WeightError::Cut`](crate::weights::WeightError::Cut) if the model cannot be divided among
    /// this many ranks.
    pub fn plan_rank(checkpoint: &Checkpoint, target: &Target, rank: Rank) -> Result<Self, LoadError> {
        let map = WeightMap::dry(checkpoint, *target, checkpoint.weight_formats()?).of_rank(rank);
        Model::plan_map(checkpoint, map)
    }

    fn plan_map(checkpoint: &Checkpoint, mut map: WeightMap<'_>) -> Result<Self, LoadError> {
        let config = FamilyConfig::of(checkpoint)?;
        let family = config.clone().claim(&mut map)?;
        map.refuse_extra()?;
        map.refuse_untied()?;
        map.refuse_bad_scales()?;
        Model::of_map(checkpoint, config, family, &map)
    }

    /// Like [`plan_rank`](Self::plan_rank), for the rank with the most weights. Apart from the
    /// weights, the plans of all ranks need the same memory.
    ///
    /// # Errors
    /// See [`plan_rank`](Self::plan_rank).
    pub fn plan_heaviest(checkpoint: &Checkpoint, target: &Target, ranks: usize) -> Result<Self, LoadError> {
        Model::heaviest(ranks, |rank| Model::plan_rank(checkpoint, target, rank))
    }

    /// Like [`plan_heaviest`](Self::plan_heaviest), with the decoder's projections quantized while
    /// they load. Returns `None` if the checkpoint is quantized already or is a GGUF file, or if
    /// weights cannot be quantized to this format while they load.
    ///
    /// # Errors
    /// See [`plan_rank`](Self::plan_rank);
    /// [`WeightError::Unsupported`](crate::weights::WeightError::Unsupported) if the target has no
    /// kernels for the format.
    pub fn plan_quantized(
        checkpoint: &Checkpoint,
        quantization: WeightQuantization,
        target: &Target,
        ranks: usize,
    ) -> Result<Option<Self>, LoadError> {
        let (WeightFormats::Unquantized, Some(scheme)) = (checkpoint.weight_formats()?, quantization.scheme()) else {
            return Ok(None);
        };
        if checkpoint.is_gguf() {
            return Ok(None);
        }
        let plan = |rank| {
            let map = WeightMap::dry(checkpoint, *target, WeightFormats::Requested(scheme));
            Model::plan_map(checkpoint, map.with_kernels().of_rank(rank))
        };
        Model::heaviest(ranks, plan).map(Some)
    }

    fn heaviest(ranks: usize, plan: impl Fn(Rank) -> Result<Self, LoadError>) -> Result<Self, LoadError> {
        let mut heaviest = plan(Rank::new(0, ranks))?;
        for rank in Rank::all(ranks).skip(1) {
            let other = plan(rank)?;
            if other.weight_bytes > heaviest.weight_bytes {
                heaviest = other;
            }
        }
        Ok(heaviest)
    }

    /// Copies the weights of the backend's [rank](Backend::rank) into `segment`, or generates
    /// random weights there if the checkpoint is random. At least
    /// [`weight_bytes`](Model::weight_bytes) of the segment must be backed. `progress` is called
    /// after each tensor with the bytes copied so far and the total, and decides whether to
    /// continue.
    ///
    /// # Errors
    /// See [`plan`](Self::plan); [`LoadError::Kernel`] if a copy fails; [`LoadError::Stopped`] if
    /// `progress` breaks.
    ///
    /// # Panics
    /// If the backed part of the segment is smaller than the weights.
    pub fn load<B: Backend>(
        checkpoint: &Checkpoint,
        backend: &B,
        segment: impl Into<Arc<Segment>>,
        progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
    ) -> Result<Self, LoadError> {
        Model::load_rank(checkpoint, backend.rank(), backend, segment, progress)
    }

    /// Like [`load`](Self::load), for a rank that may differ from the backend's. Loading does not
    /// communicate with other ranks.
    ///
    /// # Errors
    /// See [`load`](Self::load).
    pub fn load_rank<B: Backend>(
        checkpoint: &Checkpoint,
        rank: Rank,
        backend: &B,
        segment: impl Into<Arc<Segment>>,
        progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
    ) -> Result<Self, LoadError> {
        let segment = segment.into();
        let config = FamilyConfig::of(checkpoint)?;
        let formats = checkpoint.weight_formats()?;
        // SAFETY: the model owns the segment for as long as it owns the tensors, and the assertion
        // below checks that the segment is backed before any tensor is used.
        let map = unsafe { WeightMap::at(checkpoint, *backend.target(), formats, segment.address_on(rank.index())) };
        let mut map = map.of_rank(rank);
        let family = config.clone().claim(&mut map)?;
        map.refuse_bad_scales()?;
        let total = map.used();
        assert!(total <= segment.backed(), "{total} of weights do not fit a segment of {}", segment.backed());
        upload(checkpoint, backend, &map, progress)?;
        Ok(Model { segment: Some(segment), ..Model::of_map(checkpoint, config, family, &map)? })
    }

    /// The model whose `family` has claimed all weights of `map`, without a segment.
    fn of_map(
        checkpoint: &Checkpoint,
        config: FamilyConfig,
        family: Family,
        map: &WeightMap<'_>,
    ) -> Result<Self, LoadError> {
        let formats = checkpoint.weight_formats()?;
        Ok(Model {
            config,
            family,
            quantization: formats.name(),
            is_dequantized: matches!(formats, WeightFormats::Packed(_)) && map.int4_bytes() == Bytes::ZERO,
            int4_bytes: map.int4_bytes(),
            cache: checkpoint.cache(),
            state_dtype: checkpoint.state_dtype(),
            weight_bytes: map.used(),
            parameters: map.parameters(),
            block_weights: map.block_weights()?,
            segment: None,
        })
    }

    /// The segment that contains the weights; `None` for a plan. All ranks of a group share this
    /// segment.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    pub fn config(&self) -> &FamilyConfig {
        &self.config
    }

    /// The name of the method that quantized the weights, either during loading or in the
    /// checkpoint; `None` if all weights are unquantized. See
    /// [`WeightFormats::name`](crate::checkpoint::WeightFormats::name).
    pub fn quantization(&self) -> Option<&'static str> {
        self.quantization
    }

    /// Like [`quantization`](Self::quantization), but `None` if all weights in memory are
    /// dequantized.
    pub fn quantization_in_memory(&self) -> Option<&'static str> {
        self.quantization.filter(|_| !self.is_dequantized)
    }

    /// The storage format of keys and values.
    pub fn cache(&self) -> CacheFormat {
        self.cache
    }

    /// Bytes of the weights' segment.
    pub fn weight_bytes(&self) -> Bytes {
        self.weight_bytes
    }

    /// The usual name of the type of quantized weights in memory, for messages to users.
    pub fn quantized_type(&self) -> &'static str {
        if self.int4_bytes > Bytes::ZERO { "INT4" } else { Quantization::NAME }
    }

    /// Bytes of the weights that are in memory as 4-bit integers, with scales and zero points.
    pub fn int4_bytes(&self) -> Bytes {
        self.int4_bytes
    }

    /// Bytes of the draft head's weights, which are part of [`weight_bytes`](Self::weight_bytes). 0 if
    /// the model has no draft head.
    pub fn draft_bytes(&self) -> Bytes {
        self.family.decoder().draft_bytes()
    }

    /// The weights that the checkpoint has in blocks of quantized elements, if the target
    /// multiplies blocks.
    pub fn block_weights(&self) -> Option<&BlockWeights> {
        self.block_weights.as_ref()
    }

    /// Elements of all checkpoint weights that the model reads, without the scales of quantized
    /// weights. Tied tensors count once.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// The rank that holds these weights.
    pub fn rank(&self) -> Rank {
        self.family.decoder().share().rank
    }

    /// Number of times that each expert was chosen; see
    /// [`Decoder::expert_loads`](crate::blocks::decoder::Decoder::expert_loads).
    pub fn expert_loads(&self) -> Option<&Tensor<'static>> {
        self.family.decoder().expert_loads()
    }

    /// The attention layers, in groups that share block tables.
    pub fn cache_groups(&self) -> &CacheGroups {
        self.family.decoder().cache_groups()
    }

    /// The shape and the element type of this rank's blocks of keys and values on `target`. `layers`
    /// counts the segments of a block; see [`CacheGroups`].
    pub fn kv_shape(&self, target: &Target) -> KvShape {
        self.family.decoder().kv_shape(self.cache.dtype(target))
    }

    /// The shape of this rank's recurrent states on `target`; `None` if all layers are attention.
    pub fn state_shape(&self, target: &Target) -> Option<StateShape> {
        self.family.decoder().state_shape(target.activation(), self.state_dtype)
    }

    /// The cache of each decoder layer, in order, followed by the cache of the draft head's layer
    /// if the model was loaded with its draft head. `kv` has one entry for each segment of a block,
    /// which the layers of every cache group [divide](CacheGroups::location). Each gated delta net takes
    /// the next entry of `states`.
    ///
    /// # Panics
    /// If `kv` or `states` has too few entries.
    pub fn layer_caches(
        &self,
        kv: impl IntoIterator<Item = KvLayer>,
        states: impl IntoIterator<Item = StateLayer>,
    ) -> Vec<LayerCache> {
        let (kv, mut states): (Vec<_>, _) = (kv.into_iter().collect(), states.into_iter());
        let source = |layer| self.config.decoder().kv_source(layer).expect("each layer has keys and values");
        let cache = |layer| match self.cache_groups().location(source(layer)) {
            Some(KvLocation { group, segment, index }) => {
                let heads = self.family.decoder().attention(layer);
                LayerCache::Kv { layer: kv[segment].sublayer(heads.kv_heads.count, heads.head_dim, index), group }
            }
            None => LayerCache::State(states.next().expect("states for each gated delta net")),
        };
        let decoder = self.config.decoder();
        (0..decoder.layers + decoder.draft_cache_layers()).map(cache).collect()
    }

    /// Bytes of one row of the vision cache on `target`.
    pub fn picture_row_bytes(&self, target: &Target) -> Bytes {
        target.activation().bytes(self.config.embedding_layout().width())
    }

    /// Number of ranks that divide the pictures of a launch among themselves, and must therefore be
    /// linked when they encode. The number is 1 for a model on one device.
    pub fn picture_ranks(&self) -> usize {
        self.rank().of()
    }

    /// Packs pictures for one launch, each with the vision cache rows for its embeddings, and
    /// [distributes](crate::blocks::vision::share_out) the pictures over the ranks.
    pub fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> EncoderBatch {
        let patches: Vec<_> = pictures.iter().map(|(image, _)| image.grid.patches()).collect();
        let of_rank = |share: Vec<usize>| share.into_iter().map(|picture| pictures[picture]).collect();
        let of_ranks: Vec<Vec<_>> = share_out(&patches, self.picture_ranks()).into_iter().map(of_rank).collect();
        self.family.pack(&of_ranks)
    }

    /// Like [`pack`](Self::pack), but each rank encodes all of these pictures.
    pub fn pack_for_each_rank(&self, pictures: &[(&ResizedImage, &[u32])]) -> EncoderBatch {
        self.family.pack(&vec![pictures.to_vec(); self.picture_ranks()])
    }

    /// Runs the vision encoder and writes the results to the rows of `cache` `[rows, width]`. The
    /// [`EmbeddingLayout`](crate::blocks::vision::EmbeddingLayout) determines `width`. If pictures
    /// are distributed over ranks, each rank encodes its own pictures, and all ranks receive all
    /// rows.
    pub fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &EncoderBatch,
        cache: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.encode_through(scope, batch, cache, Depth::Whole)
    }

    /// Like [`encode`](Self::encode), but runs only the layers of the encoder that `depth` selects.
    pub fn encode_through<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &EncoderBatch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.assert_loaded::<B>();
        self.family.encode(scope, batch, cache, depth)
    }

    /// Runs one step of the decoder and returns `[logit_rows, vocabulary]` f32, or only this rank's
    /// columns. On a GPU, there may be gaps between the rows. `score` receives the logits of the
    /// scored rows, a few rows at a time. If `hidden` `[draft rows, draft width]` is given, it receives the
    /// rows that [`draft`](Self::draft) reads; see
    /// [`Decoder::step`](crate::blocks::decoder::Decoder::step).
    pub fn step<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        hidden: Option<&mut Tensor<'_>>,
        score: impl FnMut(&Scope<'_, B>, &Tensor<'_>) -> Result<(), KernelError>,
    ) -> Result<Tensor<'s>, KernelError> {
        self.assert_loaded::<B>();
        self.family.decoder().step(scope, batch, caches, of, hidden, score)
    }

    /// Runs the draft head after a step and returns the logits of the drafts; see
    /// [`Decoder::draft`](crate::blocks::decoder::Decoder::draft).
    ///
    /// # Panics
    /// If the model was loaded without its [draft head](Checkpoint::with_draft_head).
    pub fn draft<'s, B: Backend>(
        &'s self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        rows: DraftRows<'_, '_>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        self.assert_loaded::<B>();
        self.family.decoder().draft(scope, batch, caches, of, rows)
    }

    /// Launches a step whose arrays are already on the device, or will be when a CUDA graph of the
    /// step is replayed; see [`Decoder::step_over`](crate::blocks::decoder::Decoder::step_over).
    pub fn step_over<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        step_arrays: &Tensor<'_>,
        layout: &StepLayout,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        hidden: Option<&mut Tensor<'_>>,
    ) -> Result<Tensor<'s>, KernelError> {
        self.assert_loaded::<B>();
        self.family.decoder().step_over(scope, step_arrays, layout, caches, of, hidden)
    }

    /// Launches a pass of the draft head whose arrays are already on the device; see
    /// [`Decoder::draft_over`](crate::blocks::decoder::Decoder::draft_over).
    ///
    /// # Panics
    /// See [`draft`](Self::draft).
    pub fn draft_over<'s, B: Backend>(
        &'s self,
        scope: &'s Scope<'_, B>,
        step_arrays: &Tensor<'_>,
        layout: &StepLayout,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        rows: DraftRows<'_, '_>,
    ) -> Result<DraftLogits<'s>, KernelError> {
        self.assert_loaded::<B>();
        self.family.decoder().draft_over(scope, step_arrays, layout, caches, of, rows)
    }

    fn assert_loaded<B: Backend>(&self) {
        assert!(!B::COMPUTES || self.segment.is_some(), "a planned model has no weights to compute with");
    }
}
