//! Planned memory requirements of a model on a device: one line per claimant, before any memory is
//! taken.

use std::sync::Arc;

use bursar_budgets::{Bytes, Class, MemoryPlan, grouped};
use bursar_kernels::{BLOCK_TOKENS, CudaLink, DType, KernelError, KvShape, Quantization, StateShape, Target};
use bursar_model::{
    Envelope, MergeSize, Model, RequestCost,
    flow::CacheGroups,
    sampling::SamplingShape,
    worst_cases::{self, CacheCapacity, Footprint, Pass, WorstCase},
};

use crate::{
    compute::LAUNCHES,
    compute::graph::GraphLimits,
    compute::memory::{HostSlot, KvMemory, SamplingMemory, StateMemory},
};

/// Sizes that follow from the worst cases of an envelope. Byte sizes are whole pages, except
/// `exchange` and `row_bytes`.
#[derive(Clone, Debug)]
pub struct MemoryRequirements {
    pub weights: Bytes,
    /// The type of quantized weights in memory, and the name of their scheme. `None` if no weights
    /// in memory are quantized.
    pub quantization: Option<(&'static str, &'static str)>,
    /// Bytes of the temporaries of the largest step.
    pub step_workspace: Bytes,
    /// Shape of the sampling buffers.
    pub sampling: SamplingShape,
    /// Bytes of the temporaries of the largest vision encoder batch. 0 for a model without
    /// pictures.
    pub vision_workspace: Bytes,
    /// Bytes of the encoder cache, which holds embeddings in transit between the lanes; see
    /// [`picture_rows_in_flight`].
    pub vision_cache: Bytes,
    /// Rows of the encoder cache.
    pub cache_rows: usize,
    /// The attention layers, in groups that share block tables.
    pub cache_groups: CacheGroups,
    /// The most blocks that a sequence of the whole context holds.
    pub context_blocks: usize,
    /// Number of blocks of the probe, the small KV cache that is created first.
    pub probe_blocks: usize,
    /// Shape of captured steps. `None` on a device without graphs.
    pub graphs: Option<GraphLimits>,
    /// Bytes of the largest single collective between the ranks of several GPUs. `None` for one
    /// rank, and on a host, where ranks read each other's workspaces.
    pub exchange: Option<Bytes>,
    /// Shape of the keys and values of one token.
    pub kv_shape: KvShape,
    /// Slots of recurrent states. `None` for a model whose layers are all attention.
    pub states: Option<StateSlotCount>,
    /// Number of KV blocks for which host memory is planned; see [`with_host`](Self::with_host).
    pub host_slots: usize,
    /// Number of rows of picture embeddings for which host memory is planned.
    pub host_rows: usize,
    /// Snapshots of states that fit in the host memory of a rank.
    pub host_states: usize,
    /// Bytes of one row of the encoder cache.
    pub row_bytes: Bytes,
    /// Number of ranks over which the model is sharded.
    ranks: usize,
    pub worst_cases: Vec<(Arc<WorstCase>, Footprint)>,
    page: Bytes,
}

/// The slots of recurrent states of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSlotCount {
    pub shape: StateShape,
    /// One slot for each sequence of the envelope.
    pub sequences: usize,
    /// Slots that remain for snapshots even while every sequence of the envelope is running.
    /// Sequence slots that are not in use hold snapshots too.
    pub spare: usize,
}

impl StateSlotCount {
    pub fn slots(&self) -> usize {
        self.sequences + self.spare
    }
}

/// Slots for snapshots in addition to one slot for each sequence. Snapshots of a few common system
/// prompts survive even while all sequences are running.
const SPARE_STATES: usize = 8;

/// Minimum number of tokens in the probe (LightLLM's figure), if the sequences of the envelope can
/// have that many tokens in total.
const PROBE_TOKENS: usize = 8192;

/// Bytes that the driver allocates for one layer of a captured step. This is an estimate from a
/// measurement: 300 kernel launches used 0.7 MiB, and a layer has about a dozen kernel launches. An
/// exact number is not possible, because the driver allocates in pieces of 2 MiB. The real number
/// is measured and leased at capture.
const GRAPH_LAYER: Bytes = Bytes(32 << 10);

/// Estimate of the bytes that the driver allocates on a GPU for the streams of two lanes and their
/// first kernel launches. Once allocated, these bytes count as overhead, or as foreign memory if
/// the driver does not attribute them to this process.
const LANES: Bytes = Bytes(8 << 20);

/// Divisor of the host memory: picture embeddings get one eighth of it. In a 7B model, a row is an
/// eighth of the size of one token's keys and values.
const HOST_ROWS_PART: u64 = 8;

/// Snapshots of states get 1 / `HOST_STATES_PART` of the host memory left after picture rows. The
/// state of Qwen3.5-27B is as large as the keys and values of 2,349 tokens, so the state takes
/// about a quarter of the memory of a conversation of 8,000 tokens.
const HOST_STATES_PART: u64 = 4;

/// Returns the number of encoder cache rows that keeps both lanes busy. A row is held from before
/// the encoder batch that writes it until the last step that reads it, but not while the reply is
/// decoded. The cache must therefore hold:
///
/// - the rows of encoder batches in flight: [`LAUNCHES`] batches, filled to the last patch;
/// - the rows of steps in flight: two steps (ADR 10), in which every token may belong to a picture;
/// - the rows of one more request: the oldest prompt may be split at the end of a step, and then
///   holds the rows of its remaining pictures.
///
/// A request gets all its rows at once. The cache therefore has rows for at least two of the
/// largest requests: one is read while the next is written. No request needs more rows than a
/// context has tokens, because each row is a token of its prompt.
///
/// ```text
/// request + max(request, LAUNCHES * encoder batch rows + 2 * step tokens)
/// ```
///
/// More rows would not increase throughput: a lane that ran further ahead would only wait longer
/// later. More rows would only let the cache keep more pictures of ended requests, for later turns
/// of a conversation that show the same pictures.
pub fn picture_rows_in_flight(envelope: &Envelope, merge: MergeSize) -> usize {
    let request = RequestCost::largest(envelope, Some(merge)).cache_rows;
    let launch = merge.tokens(envelope.launch_patches);
    request + request.max(LAUNCHES * launch + STEPS * envelope.step_tokens)
}

/// Number of steps in flight.
const STEPS: usize = 2;

impl MemoryRequirements {
    /// Plans `model` for `envelope` on `target`.
    ///
    /// # Errors
    /// Returns an error if shapes do not match. A plan cannot run out of memory.
    pub fn plan(model: &Model, target: Target, envelope: &Envelope, page: Bytes) -> Result<Self, KernelError> {
        // The lease covers whole pages, so the rest of the last page is filled with additional
        // rows.
        let row_bytes = model.picture_row_bytes(&target);
        let rows = model.config().merge().map_or(0, |merge| picture_rows_in_flight(envelope, merge));
        let vision_cache = (row_bytes * rows as u64).round_up(page);
        let cache_rows = (vision_cache / row_bytes) as usize;
        let cache_groups = model.cache_groups().clone();
        let (sequences, context_tokens, step_tokens) =
            (envelope.sequences, envelope.context_tokens, envelope.step_tokens);
        let together = cache_groups.blocks_together(sequences, context_tokens, step_tokens) * BLOCK_TOKENS;
        let reach = (sequences * context_tokens).min(together);
        let probe_tokens = (step_tokens + sequences).max(PROBE_TOKENS.min(reach));
        let context_blocks = cache_groups.blocks_for(context_tokens, step_tokens);
        let probe_blocks = probe_tokens.div_ceil(BLOCK_TOKENS).max(context_blocks);
        let worst_cases = worst_cases::worst_cases(model, envelope, CacheCapacity { blocks: probe_blocks, cache_rows })
            .into_iter()
            .map(|worst_case| {
                let rows = envelope.logit_rows();
                let footprint = worst_cases::plan_with_rows(model, target, &worst_case.pass, rows)?;
                Ok((Arc::new(worst_case), footprint))
            })
            .collect::<Result<Vec<_>, KernelError>>()?;
        let peak = |is_step: bool| {
            let of_lane =
                worst_cases.iter().filter(|(worst_case, _)| matches!(worst_case.pass, Pass::Step(_)) == is_step);
            of_lane.map(|(_, footprint)| footprint.workspace.round_up(page)).max().unwrap_or(Bytes::ZERO)
        };
        let graphs = target.has_graphs().then(|| GraphLimits::of(envelope, model.config().decoder()));
        Ok(MemoryRequirements {
            weights: model.weight_bytes().round_up(page),
            quantization: model.quantization_in_memory().map(|name| (model.quantized_type(), name)),
            step_workspace: peak(true),
            sampling: SamplingShape {
                rows: envelope.logit_rows(),
                context_tokens: envelope.context_tokens,
                vocabulary: model.config().decoder().vocabulary,
            },
            vision_workspace: peak(false),
            vision_cache,
            cache_rows,
            cache_groups,
            context_blocks,
            probe_blocks,
            graphs,
            exchange: (model.rank().of() > 1 && target.has_exchange_memory()).then(|| {
                // Memory for one all-reduce of the activations of a whole step. Logits are gathered
                // a few rows at a time, so at least one row of logits must fit.
                let decoder = model.config().decoder();
                let share = decoder.share(model.rank()).expect("the model was planned for its rank");
                let logits = DType::F32.bytes(share.tokens_of_each());
                target.activation().bytes(envelope.step_tokens * decoder.hidden).max(logits)
            }),
            kv_shape: model.kv_shape(&target),
            states: model.state_shape(&target).map(|shape| StateSlotCount {
                shape,
                sequences: envelope.sequences,
                spare: SPARE_STATES.min(envelope.sequences),
            }),
            host_slots: 0,
            host_rows: 0,
            host_states: 0,
            row_bytes,
            ranks: model.rank().of(),
            worst_cases,
            page,
        })
    }

    /// Plans `bytes` of host memory for each rank. Evicted content of the caches moves to this
    /// memory (ADR 15). For a model with pictures, one eighth is for rows of the encoder cache. For
    /// a model with recurrent states, a quarter of the rest is for snapshots of the states. KV
    /// blocks get the remaining memory.
    #[must_use]
    pub fn with_host(self, bytes: Bytes) -> Self {
        let fit = |of: Bytes, slot: HostSlot| (of / slot.bytes()) as usize;
        let row = HostSlot::of_row(self.row_bytes);
        let host_rows = if self.cache_rows > 0 { fit(bytes / HOST_ROWS_PART, row) } else { 0 };
        let left = bytes - row.bytes() * host_rows as u64;
        let state = self.states.map(|states| HostSlot::of_state(states.shape));
        let host_states = state.map_or(0, |state| fit(left / HOST_STATES_PART, state));
        let of_states = state.map_or(Bytes::ZERO, HostSlot::bytes) * host_states as u64;
        let host_slots = fit(left - of_states, HostSlot::of_block(self.kv_shape));
        MemoryRequirements { host_rows, host_states, host_slots, ..self }
    }

    /// The sizes and numbers of slots in the host memory of each rank: for KV blocks, for rows of
    /// the encoder cache, and for snapshots of states.
    pub fn host_tiers(&self) -> [(HostSlot, usize); 3] {
        let of_state = self.states.map_or(HostSlot::of_row(Bytes::ZERO), |states| HostSlot::of_state(states.shape));
        [
            (HostSlot::of_block(self.kv_shape), self.host_slots),
            (HostSlot::of_row(self.row_bytes), self.host_rows),
            (of_state, self.host_states),
        ]
    }

    /// Bytes of a host tier over all ranks.
    pub fn host_tier_bytes(&self, (slot, slots): (HostSlot, usize)) -> Bytes {
        slot.bytes() * (slots * self.ranks) as u64
    }

    /// Bytes of all host tiers over all ranks.
    pub fn host_bytes(&self) -> Bytes {
        self.host_tiers().map(|tier| self.host_tier_bytes(tier)).into_iter().sum()
    }

    /// Returns the longest sequence, in tokens, that fits in `blocks` blocks. Returns `None` if a
    /// full context fits.
    pub fn too_few_tokens(&self, blocks: usize, envelope: &Envelope) -> Option<usize> {
        let is_too_small = blocks < self.context_blocks;
        is_too_small.then(|| self.cache_groups.tokens_in(blocks, envelope.step_tokens))
    }

    pub fn probe(&self) -> Bytes {
        KvMemory::bytes(self.kv_shape, self.probe_blocks, self.page)
    }

    /// Bytes of all slots of recurrent states.
    pub fn state_bytes(&self) -> Bytes {
        self.states.map_or(Bytes::ZERO, |states| StateMemory::bytes(states.shape, states.slots(), self.page))
    }

    pub fn sampling_bytes(&self) -> Bytes {
        SamplingMemory::bytes(self.sampling, self.page)
    }

    pub fn exchange_bytes(&self) -> Option<Bytes> {
        self.exchange.map(|largest| CudaLink::bytes(largest).round_up(self.page))
    }

    /// Returns the memory plan with one line per claimant. The KV cache has its minimum size, which
    /// is the size of the probe.
    pub fn memory_plan(&self) -> MemoryPlan {
        let how = self.blocks_in_words(self.probe_blocks);
        let mut plan = self.memory_without_kv();
        plan.push(Class::Kv, "probe", self.probe(), how);
        plan
    }

    /// Returns the memory plan with a KV cache of `blocks` blocks; see
    /// [`memory_plan`](Self::memory_plan).
    pub fn memory_plan_with(&self, blocks: usize) -> MemoryPlan {
        let how = self.blocks_in_words(blocks);
        let mut plan = self.memory_without_kv();
        plan.push(Class::Kv, "keys and values", KvMemory::bytes(self.kv_shape, blocks, self.page), how);
        plan
    }

    fn blocks_in_words(&self, blocks: usize) -> String {
        let how =
            format!("{} blocks of {BLOCK_TOKENS} tokens in {} layers", grouped(blocks as u64), self.kv_shape.layers);
        if self.kv_shape.dtype.needs_scales() { format!("{how}, {}", Quantization::NAME) } else { how }
    }

    fn memory_without_kv(&self) -> MemoryPlan {
        let format = self.quantization.map_or_else(String::new, |(elements, name)| format!(", {elements} ({name})"));
        let how = format!("sum of tensors, 256-byte steps{format}");
        let mut plan = MemoryPlan::new().claim(Class::Weights, "checkpoint", self.weights, how);
        plan.push(
            Class::StepWorkspace,
            "largest step",
            self.step_workspace,
            "peak of the dry run of all worst cases of a step",
        );
        let how = "each sequence's parameters, past and mask, its token for the next step, and a report";
        plan.push(Class::StepWorkspace, "choices", self.sampling_bytes(), how);
        if let Some(bytes) = self.exchange_bytes() {
            plan.push(Class::StepWorkspace, "exchange between ranks", bytes, "two halves, each of a step's sums");
        }
        if let Some(shape) = self.graphs {
            let how = "the arrays of the largest captured step";
            plan.push(Class::Graphs, "inputs of captured steps", shape.bytes(self.page), how);
            // Each captured size has two graphs: one for greedy sampling, one for any sampling.
            let attention = self.cache_groups.as_slice().iter().map(|group| group.layers.len()).sum::<usize>();
            let layers = attention + self.states.map_or(0, |states| states.shape.layers);
            let graphs = 2 * shape.sizes().len();
            let driver = (GRAPH_LAYER * (graphs * layers) as u64 + LANES).round_up(self.page);
            let how = format!("{graphs} graphs of {layers} layers, {GRAPH_LAYER} each, and {LANES} for lanes");
            plan.push(Class::Graphs, "captured steps, in the driver", driver, how);
        }
        if let Some(states) = self.states {
            let StateSlotCount { shape, sequences, spare } = states;
            let how = format!(
                "{} slots in {} layers, {} each: {sequences} for running sequences, {spare} for snapshots",
                states.slots(),
                shape.layers,
                shape.sequence_bytes(),
            );
            plan.push(Class::States, "recurrent states", self.state_bytes(), how);
        }
        if self.cache_rows > 0 {
            let how = "peak of the dry run of both worst cases of a launch";
            plan.push(Class::VisionWorkspace, "largest launch", self.vision_workspace, how);
            let how = format!("{} rows: pictures of launches and steps in progress", grouped(self.cache_rows as u64));
            plan.push(Class::VisionCache, "picture embeddings", self.vision_cache, how);
        }
        for (tier, (what, unit)) in self.host_tiers().into_iter().zip([
            ("keys and values on the host", "blocks"),
            ("picture embeddings on the host", "rows"),
            ("snapshots of states on the host", "snapshots"),
        ]) {
            if tier.1 > 0 {
                let how = format!("{} {unit}, {} each, in host memory", grouped(tier.1 as u64), tier.0.bytes());
                plan.push(Class::HostKv, what, self.host_tier_bytes(tier), how);
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::{CudaTarget, DType};
    use bursar_model::{
        checkpoint::{Checkpoint, CheckpointSource},
        demo,
        registry::shape_settings,
    };

    use super::*;
    use crate::{
        engine::{LoadOptions, Question},
        profile::{KvShare, MemoryState, Sizing},
    };

    const MERGE: MergeSize = MergeSize::new(2);

    /// An envelope with 1,024 cache rows for each picture and for each encoder batch.
    fn envelope() -> Envelope {
        Envelope { largest_pictures: 2, picture_patches: 4096, launch_patches: 4096, ..Envelope::default() }
    }

    #[test]
    fn the_vision_cache_holds_running_launches_and_steps_plus_one_request() {
        assert_eq!(picture_rows_in_flight(&envelope(), MERGE), 2048 + 2 * 1024 + 2 * 512);
        let many = Envelope { largest_pictures: 100, ..envelope() };
        assert_eq!(
            picture_rows_in_flight(&many, MERGE),
            2 * 4096,
            "two of the largest requests, each with a full context"
        );
        let least = Envelope {
            largest_pictures: 1,
            picture_patches: 4,
            launch_patches: 4,
            step_tokens: 1,
            sequences: 1,
            ..many
        };
        assert_eq!(picture_rows_in_flight(&least, MERGE), 1 + 2 + 2);
    }

    #[test]
    fn a_7b_model_on_an_h200_leaves_memory_for_target_tokens() {
        let random = shape_settings("qwen2.5-vl-7b").expect("a known shape");
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens");
        let target = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
        let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
        // Limits of `bursar bench`: a picture of 1932 x 1092 pixels per request, and two of them
        // per encoder batch.
        let envelope = Envelope {
            context_tokens: 8192,
            sequences: 256,
            step_tokens: Envelope::gpu().step_tokens,
            draft_tokens: 0,
            picture_patches: 10_764,
            pictures: 1,
            largest_pictures: 1,
            video_frames: 1,
            launch_patches: 2 * 10_764,
        };
        let page = Bytes::mib(2);
        let needs = MemoryRequirements::plan(&model, target, &envelope, page).expect("the worst cases are consistent");
        assert!(needs.vision_cache <= Bytes::mib(210), "{}", needs.vision_cache);
        // Measured on 2026-11-21: the GPU's total memory, and 563 MiB for the context, loaded code
        // and captured graphs. The canary is 256 MiB.
        let (card, overhead) = (Bytes::mib(143_155), Bytes::mib(563 + 256));
        let plan = needs.memory_plan();
        let available = card.saturating_sub(overhead).saturating_sub(plan.total());
        let sizing =
            Sizing { available, probe: needs.probe(), share: KvShare::expected_of(false, card), pinned_tokens: None };
        let tokens = sizing.blocks(needs.kv_shape, page) * BLOCK_TOKENS;
        assert!(tokens >= 2_230_000, "{tokens} tokens\n{plan}");
    }

    #[test]
    fn the_default_gpu_limits_are_consistent_and_can_be_planned() {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let target = Target::Cpu { threads: 1 };
        let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
        let (options, pictures) = (LoadOptions::default(), checkpoint.image_processor.as_ref());
        let place = MemoryState::of_available(Bytes::gib(8), Bytes::mib(2));
        let question = Question { model: &model, pictures, checkpoint: None, target, options: &options, place };
        let (inputs, needs) = question.needs().expect("the worst cases are consistent");
        let limits = &inputs.envelope;
        assert_eq!((limits.sequences, limits.step_tokens), (256, 8448));
        assert!(
            limits.context_tokens <= 8192 && limits.picture_patches <= 24_576,
            "the limits of the model lower the defaults"
        );
        question.settled(&inputs, &needs).expect("a small model fits a small card");
        assert!(needs.probe_blocks * BLOCK_TOKENS >= limits.step_tokens, "the probe holds a whole step");
    }

    #[test]
    fn a_gpu_plan_includes_driver_memory_for_graphs_and_lanes() {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let gpu = CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 };
        let claimed = |target: Target, sequences: usize| {
            let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
            let envelope = Envelope { sequences, step_tokens: 512, ..Envelope::small() };
            let needs = MemoryRequirements::plan(&model, target, &envelope, Bytes::mib(2))
                .expect("the worst cases are consistent");
            let inputs = needs.graphs.map_or(Bytes::ZERO, |shape| shape.bytes(Bytes::mib(2)));
            needs.memory_plan().of_class(&Class::Graphs).saturating_sub(inputs)
        };
        assert_eq!(
            claimed(Target::Cpu { threads: 1 }, 256),
            Bytes::ZERO,
            "a CPU has no graphs and no driver memory for lanes"
        );
        // 256 sequences: 70 graphs of 4 layers at 32 KiB per layer, plus 8 MiB for lanes, in whole
        // pages. 10 sequences: 10 such graphs.
        assert_eq!(claimed(Target::Cuda(gpu), 256), Bytes::mib(18));
        assert_eq!(claimed(Target::Cuda(gpu), 10), Bytes::mib(10));
    }

    #[test]
    fn vision_models_reserve_an_eighth_of_host_memory_for_pictures() {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let (target, page) = (Target::Cpu { threads: 1 }, Bytes::kib(64));
        let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
        let needs =
            MemoryRequirements::plan(&model, target, &Envelope::small(), page).expect("the worst cases are consistent");
        let given = Bytes::mib(8) + Bytes(77);
        let of_tier = |needs: &MemoryRequirements, tier: usize| needs.host_tier_bytes(needs.host_tiers()[tier]);
        let of_rows = |needs: &MemoryRequirements| (of_tier(needs, 1), needs.host_bytes());
        let with = needs.clone().with_host(given);
        let (rows, all) = of_rows(&with);
        let (row, block) = (needs.row_bytes, HostSlot::of_block(needs.kv_shape).bytes());
        assert!(rows <= given / 8 && rows + row > given / 8, "{rows}");
        assert!(all <= given && all + block > given, "{all}");
        let lines = |needs: &MemoryRequirements| {
            let plan = needs.memory_plan();
            let of_host = plan.claims().iter().filter(|claim| claim.class == Class::HostKv).map(|claim| claim.bytes);
            (of_host.collect::<Vec<_>>(), plan.total())
        };
        assert_eq!(
            lines(&with),
            (vec![of_tier(&with, 0), rows], lines(&needs).1),
            "the total for the device is the same"
        );
        assert_eq!(lines(&needs).0, []);
        let without = MemoryRequirements { cache_rows: 0, ..needs }.with_host(given);
        assert_eq!(of_rows(&without), (Bytes::ZERO, of_tier(&without, 0)));
    }

    #[test]
    fn a_text_model_claims_nothing_for_pictures() {
        let random = shape_settings("qwen2.5-0.5b").expect("a known shape");
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens");
        let target = Target::Cpu { threads: 1 };
        let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
        let envelope = Envelope { context_tokens: 64, sequences: 2, step_tokens: 127, ..Envelope::small() };
        let needs = MemoryRequirements::plan(&model, target, &envelope, Bytes::kib(64))
            .expect("the worst cases are consistent");
        let classes: Vec<_> = needs.memory_plan().claims().iter().map(|claim| claim.class.clone()).collect();
        assert_eq!(classes, [Class::Weights, Class::StepWorkspace, Class::StepWorkspace, Class::Kv]);
        assert_eq!((needs.vision_workspace, needs.cache_rows), (Bytes::ZERO, 0));
        assert!(!needs.step_workspace.is_zero());
        assert_eq!(needs.probe_blocks, 9, "a whole step and one token more for each sequence: 129");
    }

    #[test]
    fn a_plan_has_the_bytes_of_each_claimant() {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let (target, page, envelope) = (Target::Cpu { threads: 1 }, Bytes::kib(64), Envelope::small());
        let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
        let needs = MemoryRequirements::plan(&model, target, &envelope, page).expect("the worst cases are consistent");
        let row = model.picture_row_bytes(&target);
        let rest =
            needs.vision_cache.checked_sub(row * needs.cache_rows as u64).expect("the cache rows have separate pages");
        assert!(
            rest < row && needs.cache_rows >= picture_rows_in_flight(&envelope, MERGE),
            "the cache holds all rows in flight: {needs:?}"
        );
        assert_eq!(needs.probe_blocks, 4 * 512 / 16, "four sequences with a full context");
        let (probe, other) = (needs.memory_plan(), needs.memory_plan_with(7));
        let kv = |blocks| KvMemory::bytes(needs.kv_shape, blocks, page);
        assert_eq!([&probe, &other].map(|plan| plan.of_class(&Class::Kv)), [kv(128), kv(7)]);
        let sampling = SamplingMemory::bytes(needs.sampling, page);
        for plan in [probe, other] {
            assert_eq!(plan.of_class(&Class::Weights), model.weight_bytes().round_up(page));
            assert_eq!(plan.of_class(&Class::StepWorkspace), needs.step_workspace + sampling);
            assert_eq!(plan.of_class(&Class::VisionWorkspace), needs.vision_workspace);
            assert_eq!(plan.of_class(&Class::VisionCache), needs.vision_cache);
        }
    }
}
