//! The envelope's worst cases: the largest passes that can ever reach the device. The same code
//! plans them before loading and runs them under stress before serving.

use bursar_budgets::{Bytes, Workspace};
use bursar_kernels::{
    BLOCK_TOKENS, Backend, DType, KernelError, KvLayer, Plan, Scope, StateLayer, StateShape, Target, Tensor, Work,
    WorkCounter,
    sampling::{LISTED_MAX, RowLists, SampleBatch, SampleRow, TOP_MAX},
};

use crate::{
    Depth, Envelope, MergeSize, Model, RequestCost,
    blocks::{decoder::StepCaches, draft_head::DraftMemory, layer_cache::LayerCache, vision::most_of_a_rank},
    flow::{
        BlockTable, EmbeddingRows, Grid, LogitsOf, NextToken, ResizedImage, SHORT_ROWS, SequencePart, StateSlots,
        StepBatch,
    },
    registry::EncoderBatch,
    sampling::{SamplingBuffers, SamplingShape, Score, Scores},
    workload::{Workload, WorstCaseKind},
};

/// One of the largest passes that the envelope allows.
#[derive(Clone, Debug)]
pub struct WorstCase {
    pub name: &'static str,
    /// The workloads that this worst case covers.
    pub workloads: &'static [Workload],
    pub pass: Pass,
}

impl WorstCase {
    fn of(kind: &WorstCaseKind, pass: Pass) -> Self {
        WorstCase { name: kind.name, workloads: kind.workloads, pass }
    }
}

/// A pass over the vision encoder or the decoder.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one value per worst case, so the size does not matter")]
pub enum Pass {
    /// Encodes pictures into the vision cache.
    Encode(EncoderBatch),
    /// A decoder step, including sampling.
    Step(StepBatch),
}

/// Memory and work of a pass, planned or measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Peak bytes of the workspace.
    pub workspace: Bytes,
    /// Operations and bytes moved.
    pub work: Work,
}

/// The blocks and rows that a worst case may use.
#[derive(Clone, Copy, Debug)]
pub struct CacheCapacity {
    /// KV cache blocks. Sequences that need more blocks use some of them several times, because the
    /// KV cache of a probe is smaller than the final KV cache.
    pub blocks: usize,
    /// Rows of the vision cache. A launch writes each row only once, so if the cache has fewer
    /// rows than the launch has embeddings, the launch is made smaller. Steps may read a row
    /// any number of times.
    pub cache_rows: usize,
}

/// The worst cases of `envelope` for `model`, limited to the `capacity` of the caches.
pub fn worst_cases(model: &Model, envelope: &Envelope, capacity: CacheCapacity) -> Vec<WorstCase> {
    let mut worst_cases = Vec::new();
    let request = RequestCost::largest(envelope, model.config().merge());
    if let Some(merge) = model.config().merge() {
        let launch = envelope.launch_patches.min(merge.patches(capacity.cache_rows));
        let (largest, smallest) = (request.picture_patches.min(launch), smallest_grid(model, merge));
        // If not even the smallest picture fits, the encoder never runs.
        if largest >= smallest.patches() {
            let tile = model.config().tile();
            // Every rank encodes these pictures at the same time. All ranks may write to the same
            // rows, because the results are discarded.
            let most = most_of_a_rank(launch, tile.map_or(largest, |tile| tile.patches()), model.picture_ranks());
            let largest = tile.unwrap_or_else(|| largest_grid(largest, merge));
            let encode = |grid| Pass::Encode(pictures(model, most, grid, Model::pack_for_each_rank));
            worst_cases.push(WorstCase::of(&WorstCaseKind::LARGEST_PICTURES, encode(largest)));
            // All tiles have the same size, so the smallest pictures would not be a different case.
            if model.config().tile().is_none() {
                worst_cases.push(WorstCase::of(&WorstCaseKind::SMALLEST_PICTURES, encode(smallest)));
            }
        }
    }
    let prompts = step(model, envelope, capacity, request, envelope.step_tokens, true);
    worst_cases.push(WorstCase::of(&WorstCaseKind::PROMPTS, Pass::Step(prompts)));
    let decodes = step(model, envelope, capacity, request, envelope.sequences.min(envelope.step_tokens), false);
    worst_cases.push(WorstCase::of(&WorstCaseKind::DECODES, Pass::Step(decodes)));
    if envelope.drafts_of_step() > 0 {
        let tokens = envelope.decoding_rows(has_states(model));
        let verifies = step(model, envelope, capacity, request, tokens, false);
        if verifies.short_sequences < verifies.sequence_count() {
            // With fewer drafts, attention treats each row as a separate sequence, so the size of
            // its scratch is different.
            let tokens = tokens.min(SHORT_ROWS * envelope.sequences);
            let short = step(model, envelope, capacity, request, tokens, false);
            worst_cases.push(WorstCase::of(&WorstCaseKind::VERIFIES, Pass::Step(short)));
        }
        worst_cases.push(WorstCase::of(&WorstCaseKind::VERIFIES, Pass::Step(verifies)));
    }
    worst_cases
}

/// Runs a pass on shapes only. Returns the peak workspace bytes of the pass on `target`, and the
/// work of the pass.
pub fn plan(model: &Model, target: Target, pass: &Pass) -> Result<Footprint, KernelError> {
    plan_through(model, target, pass, Depth::Whole)
}

/// Like [`plan`], with sampling buffers of `logit_rows` rows, which may be more than the pass has.
/// The previous step may have had this many rows, and sampling needs scratch for each of its
/// tokens.
pub fn plan_with_rows(model: &Model, target: Target, pass: &Pass, logit_rows: usize) -> Result<Footprint, KernelError> {
    let shape = sampling_shape(model, pass);
    let shape = SamplingShape { rows: shape.rows.max(logit_rows), ..shape };
    dry(model, target, shape, |scope, layers, cache, buffers| {
        run(model, scope, pass, Depth::Whole, layers, cache, buffers)
    })
}

fn has_states(model: &Model) -> bool {
    model.config().decoder().step_format().has_states
}

/// The smallest depth at which a pass reaches its peak memory. Layers of one kind use equal memory,
/// so the last layer of this depth is the first layer of the kind that uses the most memory.
///
/// # Errors
/// See [`plan`].
pub fn proof(model: &Model, target: Target, pass: &Pass) -> Result<Depth, KernelError> {
    let peak = plan(model, target, pass)?.workspace;
    let mut layers = 1;
    // The loop ends at the last layer at the latest, because that depth is the whole pass.
    while plan_through(model, target, pass, Depth::First(layers))?.workspace != peak {
        layers += 1;
    }
    Ok(Depth::First(layers))
}

fn plan_through(model: &Model, target: Target, pass: &Pass, depth: Depth) -> Result<Footprint, KernelError> {
    let shape = sampling_shape(model, pass);
    dry(model, target, shape, |scope, layers, cache, buffers| run(model, scope, pass, depth, layers, cache, buffers))
}

/// The work of a pass that samples greedily and sends only the sampled tokens to the host. The
/// minimum time that a device needs for this work is a lower bound for the time of the pass.
pub fn work(model: &Model, target: Target, pass: &Pass) -> Result<Work, KernelError> {
    let plain =
        |scope: &Scope<'_, Plan>, layers: &[LayerCache], cache: &mut Tensor<'_>, buffers: &mut SamplingBuffers<'_>| {
            run_choosing(model, scope, pass, Depth::Whole, layers, cache, buffers, SamplingFeatures::Greedy)
        };
    Ok(dry(model, target, sampling_shape(model, pass), plain)?.work)
}

/// `count` pictures of `grid` without content, packed for planning a launch.
///
/// # Panics
/// If the model takes no pictures.
pub fn blank_pictures(model: &Model, count: usize, grid: Grid) -> EncoderBatch {
    pictures(model, count * grid.patches(), grid, Model::pack)
}

/// Calls `run` with a plan and with addresses that must not be accessed, and returns the footprint.
fn dry(
    model: &Model,
    target: Target,
    shape: SamplingShape,
    run: impl FnOnce(&Scope<'_, Plan>, &[LayerCache], &mut Tensor<'_>, &mut SamplingBuffers<'_>) -> Result<(), KernelError>,
) -> Result<Footprint, KernelError> {
    let (workspace, counter, backend) = (Workspace::dry(), WorkCounter::default(), Plan::of_rank(target, model.rank()));
    let kv = model.kv_shape(&target);
    let bytes = kv.block_bytes();
    // SAFETY: a plan works on shapes only and never accesses the KV cache.
    let kv =
        (0..kv.layers).map(|_| unsafe { KvLayer::new(workspace.address(), usize::MAX / bytes.as_usize().max(1), kv) });
    let state_shape = model.state_shape(&target);
    // SAFETY: a plan works on shapes only and never accesses the states.
    let state = |shape: StateShape| unsafe { StateLayer::new(workspace.address(), u32::MAX as usize, shape) };
    let states = state_shape.into_iter().flat_map(|shape| std::iter::repeat_n(shape, shape.layers)).map(state);
    let layers = model.layer_caches(kv, states);
    let cache_shape = [u32::MAX as usize, model.config().embedding_layout().width()];
    // SAFETY: a plan works on shapes only and never accesses the vision cache.
    let mut cache = unsafe { Tensor::persistent(workspace.address(), cache_shape, target.activation()) };
    // SAFETY: a plan works on shapes only and never accesses the sampling buffers.
    let words = unsafe { Tensor::persistent(workspace.address(), [shape.words()], DType::U32) };
    let mut buffers = SamplingBuffers::over(words, shape);
    run(&Scope::new(&backend, &workspace, &counter), &layers, &mut cache, &mut buffers)?;
    Ok(Footprint { workspace: workspace.high_water(), work: counter.total() })
}

/// The shape of the sampling buffers for the rows of `pass` that sample.
fn sampling_shape(model: &Model, pass: &Pass) -> SamplingShape {
    let (rows, context_tokens) = match pass {
        Pass::Encode(_) => (0, 0),
        Pass::Step(batch) => {
            (batch.logit_rows.len(), batch.context_lengths.iter().max().map_or(0, |most| *most as usize))
        }
    };
    SamplingShape { rows, context_tokens, vocabulary: model.config().decoder().vocabulary }
}

/// Runs a pass as in serving. A step runs the decoder, scores prompt tokens, and samples in
/// `buffers`, which must have a slot for each row of logits. Each row asks for every
/// sampling feature. Layers beyond `depth` are skipped.
pub fn run<B: Backend>(
    model: &Model,
    scope: &Scope<'_, B>,
    pass: &Pass,
    depth: Depth,
    layers: &[LayerCache],
    cache: &mut Tensor<'_>,
    buffers: &mut SamplingBuffers<'_>,
) -> Result<(), KernelError> {
    run_choosing(model, scope, pass, depth, layers, cache, buffers, SamplingFeatures::Everything)
}

/// Sampling features that the rows of a step ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SamplingFeatures {
    Greedy,
    Everything,
}

#[expect(clippy::too_many_arguments, reason = "a pass, how it runs, and the memory that it runs on")]
fn run_choosing<B: Backend>(
    model: &Model,
    scope: &Scope<'_, B>,
    pass: &Pass,
    depth: Depth,
    layers: &[LayerCache],
    cache: &mut Tensor<'_>,
    buffers: &mut SamplingBuffers<'_>,
    wanted: SamplingFeatures,
) -> Result<(), KernelError> {
    match pass {
        Pass::Encode(batch) => {
            model.encode_through(scope, batch, cache, depth)?;
            scope.moment()?.wait().map(drop)
        }
        Pass::Step(batch) => {
            let vocabulary = buffers.shape().vocabulary;
            let top = if wanted == SamplingFeatures::Everything { TOP_MAX } else { 0 };
            let score = |row: usize| Score { token: (row % vocabulary) as u32, top };
            let scored: Vec<Score> = (0..batch.score_rows.len()).map(score).collect();
            let mut scores = Scores::begin(scope, &scored, vocabulary)?;
            let first = &layers[..depth.of(layers.len())];
            let caches = StepCaches { layers: first, pictures: Some(cache), previous: &buffers.chosen() };
            let of = match wanted {
                SamplingFeatures::Greedy => LogitsOf::OwnRank,
                SamplingFeatures::Everything => LogitsOf::AllRanks,
            };
            let decoder = model.config().decoder();
            let take = || DraftMemory::take(scope, decoder, batch.token_count(), batch.logit_rows.len());
            let mut drafting = batch.drafts.is_some().then(take).transpose()?;
            let mut report_words = 0;
            {
                // The logits of the step are released before the draft head computes its logits.
                let scope = &scope.scope();
                let score = |scope: &Scope<'_, B>, logits: &Tensor<'_>| scores.score(scope, logits);
                let logits =
                    model.step(scope, batch, &caches, of, drafting.as_mut().map(|memory| &mut memory.hidden), score)?;
                // The scores are downloaded before the tokens, and the pass waits for the tokens.
                // Scores are downloaded twice because two steps can be in flight, each with a
                // separate buffer on the host.
                drop([scores.download(scope)?, scores.download(scope)?]);
                match wanted {
                    SamplingFeatures::Greedy => buffers.take_argmax(scope, &logits)?,
                    SamplingFeatures::Everything => {
                        // A plan does not read these words, and there may be gigabytes of them.
                        if B::COMPUTES {
                            buffers.ask(scope, &everything(batch, logits.columns()))?;
                        }
                        buffers.choose(scope, &logits)?;
                        report_words = buffers.shape().layout(logits.rows()).report_words();
                    }
                }
            }
            if let Some(memory) = &mut drafting {
                let caches = StepCaches { layers, pictures: Some(cache), previous: &buffers.chosen() };
                let scope = scope.scope();
                let logits = model.draft(&scope, batch, &caches, LogitsOf::OwnRank, memory.rows())?;
                logits.choose(&scope, &mut memory.drafted)?;
            }
            scope.download_later::<u32>(&buffers.results(report_words))?.wait().map(drop)
        }
    }
}

/// Sampling requests in which each row asks for every feature: penalties over as many past tokens
/// as the context has, half of them prompt tokens; a mask; the maximum number of biases and
/// forbidden tokens; top-k, top-p and min-p; and reports of log-probabilities.
fn everything(batch: &StepBatch, vocabulary: usize) -> Vec<u32> {
    let row = SampleRow {
        temperature: 0.9,
        top_p: 0.9,
        min_p_logarithm: -5.0,
        presence: 0.5,
        frequency: 0.5,
        repetition: 1.1,
        top_k: 100,
        top: TOP_MAX as u32,
        ..SampleRow::default()
    };
    let listed: Vec<u32> = (0..vocabulary.min(LISTED_MAX) as u32).collect();
    let biases = vec![1.0; listed.len()];
    let mask = vec![u32::MAX; vocabulary.div_ceil(u32::BITS as usize)];
    let longest = batch.context_lengths.iter().max().map_or(0, |most| *most as usize);
    let past: Vec<u32> = (0..longest as u32).map(|token| token % vocabulary as u32).collect();
    let mut asked = SampleBatch::new(vocabulary);
    let ends = batch.query_starts[1..].iter().zip(&batch.context_lengths);
    // The tokens up to each row, over which its penalties reach.
    let context_of = |row: &u32| {
        let (end, context) = ends.clone().find(|(end, _)| row < end).expect("each row belongs to a sequence");
        context - (end - 1 - row)
    };
    for context in batch.logit_rows.iter().map(context_of) {
        let (prompt, produced) = past[..context as usize].split_at(context as usize / 2);
        let forbidden = &listed[..listed.len() / 2];
        let allowed = Some(&mask[..]);
        let row_lists =
            RowLists { allowed, forbidden, biased: &listed, biases: &biases, prompt, produced, unseen: None };
        asked.push(&row, &row_lists);
    }
    let mut words = Vec::new();
    asked.pack(batch.logit_rows.len(), &mut words);
    words
}

/// The grid of a still picture with `rows` by `columns` patches.
fn still(rows: usize, columns: usize) -> Grid {
    Grid { t: 1, h: rows as u32, w: columns as u32 }
}

/// The grid of a picture that becomes one embedding, or of a tile if all pictures are tiles.
fn smallest_grid(model: &Model, merge: MergeSize) -> Grid {
    model.config().tile().unwrap_or_else(|| still(merge.side(), merge.side()))
}

/// A nearly square grid of at most `patches` patches. The shorter side, in tokens, is the integer
/// square root of the number of tokens, so a picture that is less square may have more patches.
fn largest_grid(patches: usize, merge: MergeSize) -> Grid {
    let tokens = merge.tokens(patches);
    let side = tokens.isqrt();
    still(side * merge.side(), tokens / side * merge.side())
}

/// A picture and its rows of the vision cache.
type Placed<'p> = (&'p ResizedImage, &'p [u32]);

/// As many pictures of `grid` as fit into `launch_patches`, and the smallest pictures in the
/// remaining patches. Each picture has as many frames as a step of a video, because such a step has
/// more bytes than a still picture.
fn pictures(
    model: &Model,
    launch_patches: usize,
    grid: Grid,
    pack: fn(&Model, &[Placed<'_>]) -> EncoderBatch,
) -> EncoderBatch {
    let merge = model.config().merge().expect("only a family with pictures has this worst case");
    let patch = model.config().patch().expect("a model with a vision tower");
    let [large, small] = [grid, smallest_grid(model, merge)].map(|grid| ResizedImage::blank(grid, patch));
    let whole = launch_patches / grid.patches();
    let rest = launch_patches % grid.patches() / small.grid.patches();
    let mut next_row = 0;
    let pictures: Vec<(&ResizedImage, Vec<u32>)> = std::iter::repeat_n(&large, whole)
        .chain(std::iter::repeat_n(&small, rest))
        .map(|patches| {
            let rows = next_row..next_row + patches.grid.tokens(merge) as u32;
            next_row = rows.end;
            (patches, rows.collect())
        })
        .collect();
    let views: Vec<_> = pictures.iter().map(|(patches, rows)| (*patches, rows.as_slice())).collect();
    pack(model, &views)
}

/// A step of `tokens` tokens, divided among as many sequences as the envelope allows. Each sequence
/// ends at the full context and asks for the logits of its last tokens, so that the step has as
/// many rows of logits as the envelope allows. If the model takes pictures, every token belongs to
/// a picture. The step is smaller if the context is shorter than a sequence's share. If the model
/// has a draft head, the step has the inputs of the head.
fn step(
    model: &Model,
    envelope: &Envelope,
    capacity: CacheCapacity,
    request: RequestCost,
    tokens: usize,
    are_scored: bool,
) -> StepBatch {
    assert!(tokens > 0 && request.tokens > 0, "an envelope allows at least one token: {envelope:?}");
    let sequences = envelope.sequences.min(tokens);
    let tokens = tokens.min(sequences * request.tokens);
    let logits = envelope.logit_rows().min(tokens);
    let blocks: Vec<u32> =
        (0..request.tokens.div_ceil(BLOCK_TOKENS)).map(|block| (block % capacity.blocks.max(1)) as u32).collect();
    let tables = vec![BlockTable::from(blocks); model.cache_groups().count()];
    let divided = |count: usize| (0..sequences).map(move |s| count / sequences + usize::from(s < count % sequences));
    let (shares, logits): (Vec<_>, Vec<_>) = divided(tokens).zip(divided(logits)).unzip();
    let longest = shares[0];
    let ids = vec![0u32; longest];
    let positions = vec![[0u32; 3]; longest];
    let rows: Vec<u32> = (0..longest).map(|row| (row % capacity.cache_rows.max(1)) as u32).collect();
    let shows_pictures = model.config().image_token().is_some() && capacity.cache_rows > 0;
    let pictures: Vec<Vec<EmbeddingRows<'_>>> = shares
        .iter()
        .map(|share| {
            if shows_pictures {
                vec![EmbeddingRows { tokens: 0..*share, cache_rows: &rows[..*share] }]
            } else {
                Vec::new()
            }
        })
        .collect();
    let has_states = has_states(model);
    let parts: Vec<SequencePart<'_>> = shares
        .iter()
        .zip(&pictures)
        .enumerate()
        .map(|(sequence, (share, pictures))| SequencePart {
            tokens: &ids[..*share],
            unseen: None,
            positions: &positions[..*share],
            cached_tokens: request.tokens - share,
            tables: &tables,
            pictures,
            logit_rows: logits[sequence],
            // In a worst case of decoding sequences, the rows without logits are accepted drafts.
            repeated: if are_scored { 0 } else { share - logits[sequence] },
            scored: 0..if are_scored { *share } else { 0 },
            state: has_states.then(|| StateSlots::in_place(sequence as u32)),
        })
        .collect();
    if model.config().decoder().draft_head.is_none() {
        return StepBatch::pack(&parts);
    }
    let known = NextToken::Known { token: 0, cache_row: shows_pictures.then_some(0) };
    let next = |rows: &usize| if *rows > 0 { NextToken::Chosen } else { known };
    StepBatch::pack_with_drafts(&parts, &logits.iter().map(next).collect::<Vec<_>>())
}
