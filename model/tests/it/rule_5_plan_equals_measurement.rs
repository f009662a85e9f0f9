//! Rule 5: for every worst case, the plan equals the measurement to the byte, and no pass within
//! the envelope uses more memory than the worst cases.

use std::{cell::Cell, sync::Arc};

use bursar_budgets::{Bytes, Class, Segment, Workspace};
use bursar_kernels::{
    BLOCK_TOKENS, Backend, Cpu, CudaTarget, DType, KernelError, Rank, Scope, Target, Tensor, WorkCounter,
    ops::patchify::PatchSize,
};
use bursar_model::{
    Depth, Envelope, Model,
    checkpoint::{Checkpoint, CheckpointSource, DraftProjection},
    flow::{
        BlockTable, CacheFormat, EmbeddingRows, Grid, NextToken, ResizedImage, SequencePart, StateSlots, StepBatch,
    },
    registry,
    sampling::{SamplingBuffers, SamplingShape},
    workload::Workload,
    worst_cases::{self, CacheCapacity, Footprint, Pass},
};
use proptest::prelude::*;

use crate::{
    bench::{self, Memory, Random},
    copy::Copy,
};

const QWEN2_5_VL: &str = "tests/golden/qwen2_5_vl";
const QWEN2_VL: &str = "tests/golden/qwen2_vl";
/// The first checkpoint has tower heads of 64, and a fourth decoder layer without a DeepStack
/// feature. The second has tower heads of 72, and a DeepStack feature is added after each of its
/// three decoder layers.
const QWEN3_VL: [&str; 2] = ["tests/golden/qwen3_vl", "tests/golden/qwen3_vl_72"];
const INTERNVL: [&str; 2] = ["tests/golden/internvl", "tests/golden/internvl_chat"];
const QWEN2: &str = "tests/golden/qwen2";
/// A checkpoint with head norms, and with biases of every projection.
const QWEN3: &str = "tests/golden/qwen3";
/// Checkpoints with experts in every layer.
const MIXTURES: [&str; 2] = ["tests/golden/qwen3_moe", "tests/golden/qwen3_vl_moe"];
/// Checkpoints with gated delta nets. The second has experts and a shared expert.
const HYBRIDS: [&str; 2] = ["tests/golden/qwen3_5", "tests/golden/qwen3_5_moe"];
/// Draft models of checkpoints with attention in all layers.
const DRAFT_MODELS: [&str; 4] = [
    "tests/golden/eagle3",
    "tests/golden/eagle3_vl",
    "tests/golden/gemma4_assistant",
    "tests/golden/gemma4_assistant_vl",
];
/// Checkpoints with FP8 weights: by block, by channel, by tensor, and with experts. The experts'
/// gated products are quantized, and the router reads unquantized rows.
const FP8: [&str; 4] = [
    "tests/golden/qwen3_fp8",
    "tests/golden/qwen3_fp8_dynamic",
    "tests/golden/qwen3_fp8_modelopt",
    "tests/golden/qwen3_moe_fp8",
];
/// Checkpoints whose layers normalize the results of attention and of the MLP.
const GEMMA: [&str; 8] = [
    "tests/golden/gemma3_text",
    "tests/golden/gemma3",
    "tests/golden/gemma4_text",
    "tests/golden/gemma4_sharing",
    "tests/golden/gemma4_moe",
    "tests/golden/gemma4",
    "tests/golden/gemma4_clipped",
    "tests/golden/gemma4_unified",
];
const LLAMA: &str = "tests/golden/llama_biased";
const DEMO: &str = "model/demo/checkpoint";

/// Maximum rows of logits of the envelopes below: 7 sequences with 3 drafts each.
const LOGIT_ROWS: usize = 28;

/// Envelopes with sizes that do not divide each other: encode batches smaller and larger than a
/// picture, steps with more sequences than tokens, contexts shorter than a sequence's share.
fn envelopes() -> Vec<Envelope> {
    let envelope = |context_tokens, sequences, step_tokens, picture_patches, launch_patches| Envelope {
        context_tokens,
        sequences,
        step_tokens,
        draft_tokens: sequences % 4,
        picture_patches,
        pictures: 3,
        largest_pictures: 3,
        video_frames: 8,
        launch_patches,
    };
    vec![
        envelope(100, 3, 33, 96, 300),
        envelope(257, 7, 131, 36, 500),
        envelope(16, 1, 45, 4, 4),
        envelope(31, 3, 200, 1000, 150),
        envelope(64, 7, 5, 60, 63),
    ]
}

/// A loaded model with caches of this `capacity`.
struct Machine {
    model: Model,
    cpu: Cpu,
    capacity: CacheCapacity,
    caches: bench::Caches,
    cache: Segment,
    sampling: SamplingShape,
    /// Memory of the sampling buffers.
    chosen: Segment,
    /// A workspace that is larger than any pass needs. Tests add ballast until a pass barely fits.
    workspace: Workspace,
}

impl Machine {
    fn on(cpu: Cpu, checkpoint: Checkpoint, capacity: CacheCapacity) -> Self {
        let memory = Memory::new(Bytes::mib(160));
        let planned = Model::plan_rank(&checkpoint, cpu.target(), cpu.rank()).expect("the model can be planned");
        let weights = memory.poisoned(&cpu, Class::Weights, planned.weight_bytes());
        let model = Model::load(&checkpoint, &cpu, weights, |_, _| std::ops::ControlFlow::Continue(()))
            .expect("the model loads");
        let caches = bench::Caches::poisoned(&memory, &cpu, &model, capacity.blocks);
        let row = model.picture_row_bytes(cpu.target());
        let cache = memory.poisoned(&cpu, Class::VisionCache, row * capacity.cache_rows as u64);
        let sampling =
            SamplingShape { rows: LOGIT_ROWS, context_tokens: 300, vocabulary: model.config().decoder().vocabulary };
        let chosen = memory.poisoned(&cpu, Class::StepWorkspace, DType::U32.bytes(sampling.words()));
        let workspace = Workspace::over(memory.poisoned(&cpu, Class::StepWorkspace, Bytes::mib(64)));
        Machine { model, cpu, capacity, caches, cache, sampling, chosen, workspace }
    }

    /// Executes a pass in a workspace of `bytes`.
    fn run(&self, pass: &Pass, depth: Depth, bytes: Bytes) -> Result<Footprint, KernelError> {
        let ballast = self.workspace.frame();
        ballast.take(self.workspace.capacity() - bytes)?;
        self.workspace.reset_high_water();
        let below = self.workspace.used();
        let layers = self.caches.layers(&self.model, self.cpu.target());
        let cache_shape = [self.capacity.cache_rows, self.model.config().embedding_layout().width()];
        // SAFETY: the cache segment is backed for these rows, and only the
        // test's thread accesses them.
        let mut cache =
            unsafe { Tensor::persistent(self.cache.address(), cache_shape, self.cpu.target().activation()) };
        let rows = match pass {
            Pass::Step(batch) => batch.logit_rows.len(),
            Pass::Encode(_) => LOGIT_ROWS,
        };
        let sampling = SamplingShape { rows, ..self.sampling };
        // SAFETY: the backed segment is at least as large as these words, and only the
        // test's thread accesses it.
        let words = unsafe { Tensor::persistent(self.chosen.address(), [sampling.words()], DType::U32) };
        let mut buffers = SamplingBuffers::over(words, sampling);
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.cpu, &self.workspace, &counter);
        worst_cases::run(&self.model, &scope, pass, depth, &layers, &mut cache, &mut buffers)?;
        Ok(Footprint { workspace: self.workspace.high_water() - below, work: counter.total() })
    }
}

/// Compares plan and measurement for a model with identical layers.
fn every_worst_case_takes_its_planned_memory(folder: &str) {
    let alike = |machine: &Machine, pass: &Pass, planned: Footprint, what: &str| {
        let proof = worst_cases::proof(&machine.model, *machine.cpu.target(), pass);
        let proof = proof.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(proof, Depth::First(1), "{what}: all layers of these models have the same cost");
        let proven = machine.run(pass, proof, planned.workspace);
        let proven = proven.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(proven.workspace, planned.workspace, "{what}, the first layer only");
        assert!(proven.work.flops < planned.work.flops, "{what}, the first layer only");
        let short = machine.run(pass, proof, planned.workspace - Bytes(256));
        assert!(matches!(short, Err(KernelError::Workspace(_))), "{what}, {proof:?}: {short:?}");
    };
    every_worst_case(folder, CacheFormat::Plain, alike);
}

/// Compares each worst case with its plan, and then calls `check` with it.
fn every_worst_case(folder: &str, cache: CacheFormat, check: impl Fn(&Machine, &Pass, Footprint, &str)) {
    for threads in [1, 2] {
        every_worst_case_on(Cpu::new(threads), folder, cache, &check);
    }
}

/// Same as [`every_worst_case`], on one backend.
fn every_worst_case_on(cpu: Cpu, folder: &str, cache: CacheFormat, check: impl Fn(&Machine, &Pass, Footprint, &str)) {
    every_worst_case_of(cpu, bench::open(folder).with_cache(cache), folder, check);
}

/// Same as [`every_worst_case_on`], for an open checkpoint, whose options are not changed.
fn every_worst_case_of(
    cpu: Cpu,
    checkpoint: Checkpoint,
    folder: &str,
    check: impl Fn(&Machine, &Pass, Footprint, &str),
) {
    // There are fewer blocks than the longest context needs, so worst cases use
    // some blocks several times.
    let capacity = CacheCapacity { blocks: 11, cache_rows: 130 };
    let machine = Machine::on(cpu, checkpoint, capacity);
    let (target, rank) = (*machine.cpu.target(), machine.cpu.rank());
    for envelope in envelopes() {
        for worst_case in worst_cases::worst_cases(&machine.model, &envelope, capacity) {
            let what = format!("{folder}, {target:?}, {rank:?}, {envelope:?}, {}", worst_case.name);
            let planned = worst_cases::plan(&machine.model, target, &worst_case.pass);
            let planned = planned.unwrap_or_else(|error| panic!("{what}: {error}"));
            let measured = machine.run(&worst_case.pass, Depth::Whole, planned.workspace);
            assert_eq!(measured.unwrap_or_else(|error| panic!("{what}: {error}")), planned, "{what}");
            let short = machine.run(&worst_case.pass, Depth::Whole, planned.workspace - Bytes(256));
            assert!(matches!(short, Err(KernelError::Workspace(_))), "{what}: {short:?}");
            check(&machine, &worst_case.pass, planned, &what);
        }
    }
}

#[test]
fn every_worst_case_of_a_rank_takes_its_planned_memory() {
    for (folder, of) in [(QWEN2_5_VL, 2), (QWEN3_VL[0], 4), (LLAMA, 4), (MIXTURES[0], 2)] {
        bench::on_ranks(of, |cpu| every_worst_case_on(cpu, folder, CacheFormat::Plain, |_, _, _, _| {}));
    }
}

#[test]
fn every_worst_case_of_qwen2_5_vl_takes_its_planned_memory() {
    every_worst_case_takes_its_planned_memory(QWEN2_5_VL);
}

#[test]
fn every_worst_case_of_qwen2_vl_takes_its_planned_memory() {
    every_worst_case_takes_its_planned_memory(QWEN2_VL);
}

#[test]
fn every_worst_case_of_qwen3_vl_takes_its_planned_memory() {
    QWEN3_VL.into_iter().for_each(every_worst_case_takes_its_planned_memory);
}

#[test]
fn every_worst_case_of_internvl_takes_its_planned_memory() {
    INTERNVL.into_iter().for_each(every_worst_case_takes_its_planned_memory);
}

#[test]
fn every_worst_case_of_qwen2_takes_its_planned_memory() {
    every_worst_case_takes_its_planned_memory(QWEN2);
}

#[test]
fn every_worst_case_of_qwen3_takes_its_planned_memory() {
    every_worst_case_takes_its_planned_memory(QWEN3);
}

#[test]
fn every_worst_case_of_mixtures_takes_its_planned_memory() {
    MIXTURES.into_iter().for_each(every_worst_case_takes_its_planned_memory);
}

#[test]
fn every_worst_case_of_gemma_takes_its_planned_memory() {
    GEMMA.into_iter().for_each(|folder| every_worst_case(folder, CacheFormat::Plain, |_, _, _, _| {}));
    bench::on_ranks(4, |cpu| every_worst_case_on(cpu, GEMMA[0], CacheFormat::Plain, |_, _, _, _| {}));
}

#[test]
fn every_worst_case_of_hybrids_takes_its_planned_memory() {
    HYBRIDS.into_iter().for_each(|folder| every_worst_case(folder, CacheFormat::Plain, |_, _, _, _| {}));
    bench::on_ranks(2, |cpu| every_worst_case_on(cpu, HYBRIDS[0], CacheFormat::Plain, |_, _, _, _| {}));
}

#[test]
fn worst_cases_with_a_draft_head_take_their_planned_memory() {
    let with_head = |cpu, folder, projection| {
        let checkpoint = bench::open_with_head(folder).with_draft_projection(projection);
        every_worst_case_of(cpu, checkpoint, folder, |machine, pass, planned, what| {
            let proof = worst_cases::proof(&machine.model, *machine.cpu.target(), pass).expect("the pass is planned");
            let proven = machine.run(pass, proof, planned.workspace).expect("the first layers run");
            assert_eq!(proven.workspace, planned.workspace, "{what}");
        });
    };
    for projection in [DraftProjection::Decoder, DraftProjection::Int4] {
        HYBRIDS.into_iter().for_each(|folder| with_head(Cpu::new(2), folder, projection));
        bench::on_ranks(2, |cpu| with_head(cpu, HYBRIDS[0], projection));
    }
    DRAFT_MODELS.into_iter().for_each(|folder| with_head(Cpu::new(2), folder, DraftProjection::Decoder));
    for folder in &DRAFT_MODELS[1..3] {
        bench::on_ranks(2, |cpu| with_head(cpu, folder, DraftProjection::Decoder));
    }
}

#[test]
fn every_worst_case_of_fp8_weights_takes_its_planned_memory() {
    FP8.into_iter().for_each(|folder| every_worst_case(folder, CacheFormat::Plain, |_, _, _, _| {}));
}

#[test]
fn worst_cases_over_an_fp8_cache_take_their_planned_memory() {
    [QWEN2_5_VL, QWEN3].into_iter().for_each(|folder| every_worst_case(folder, CacheFormat::Fp8, |_, _, _, _| {}));
}

#[test]
fn a_mixture_after_dense_layers_is_proven_with_two_layers() {
    let target = Target::Cpu { threads: 2 };
    // The experts are so wide that they need more memory than anything else in a layer.
    let copy = Copy::of("tests/golden/qwen3_moe_sparse").set("config.json", &["moe_intermediate_size"], 2048.into());
    let random =
        registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("the folder has the settings");
    let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens");
    let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
    let capacity = CacheCapacity { blocks: 11, cache_rows: 0 };
    for worst_case in worst_cases::worst_cases(&model, &envelopes()[1], capacity) {
        let proof = worst_cases::proof(&model, target, &worst_case.pass).expect("the worst case can be planned");
        assert_eq!(proof, Depth::First(2), "{}", worst_case.name);
    }
}

#[test]
fn every_worst_case_of_llama_takes_its_planned_memory() {
    every_worst_case_takes_its_planned_memory(LLAMA);
}

#[test]
fn every_worst_case_of_the_demo_takes_its_planned_memory() {
    every_worst_case_takes_its_planned_memory(DEMO);
}

#[test]
fn a_launch_has_no_more_embeddings_than_cache_rows() {
    let model = Model::plan(&bench::open(QWEN2_5_VL), &Target::Cpu { threads: 2 }).expect("the model can be planned");
    let envelope = Envelope { launch_patches: 400, picture_patches: 100, ..Envelope::default() };
    let embeddings = |cache_rows| -> Vec<usize> {
        let worst_cases = worst_cases::worst_cases(&model, &envelope, CacheCapacity { blocks: 4, cache_rows });
        let launches = worst_cases.iter().filter_map(|worst_case| match &worst_case.pass {
            Pass::Encode(batch) => Some(batch.embeddings()),
            Pass::Step(_) => None,
        });
        launches.collect()
    };
    assert_eq!(embeddings(1000), [100, 100]);
    assert_eq!(embeddings(30), [30, 30]);
    assert_eq!(embeddings(7), [7, 7]);
    assert!(embeddings(0).is_empty(), "a pass over no rows launches nothing");
}

#[test]
fn an_envelope_beyond_this_machines_memory_can_be_planned() {
    let model = Model::plan(&bench::open(QWEN2_5_VL), &Target::Cpu { threads: 2 }).expect("the model can be planned");
    let envelope = Envelope { context_tokens: 1 << 20, sequences: 4096, step_tokens: 1 << 20, ..Envelope::default() };
    let capacity = CacheCapacity { blocks: 512, cache_rows: 2048 };
    let worst_cases = worst_cases::worst_cases(&model, &envelope, capacity);
    let peaks = worst_cases.iter().map(|worst_case| peak(&model, Target::Cpu { threads: 2 }, &worst_case.pass));
    let largest = peaks.max().expect("there is at least one worst case");
    // The block tables of 65,536 blocks for 4,096 sequences take 1 GiB by themselves.
    assert!(largest > Bytes::gib(5), "{largest}");
}

/// Generator of random passes within the envelope.
struct Within<'m> {
    model: &'m Model,
    envelope: Envelope,
    capacity: CacheCapacity,
    random: Random,
}

impl Within<'_> {
    fn up_to(&mut self, most: usize) -> usize {
        // The result is often exactly the limit, because plans are most often wrong there.
        if self.random.below(3) == 0 { most } else { 1 + self.random.below(most) }
    }

    fn step(&mut self) -> Pass {
        let (mut left, mut drafts) = (self.up_to(self.envelope.step_tokens), self.envelope.drafts_of_step());
        let sequences = self.up_to(self.envelope.sequences);
        let mut shares = Vec::new();
        let (evenly, all_want) = (self.random.below(2) == 0, self.random.below(2) == 0);
        while left > 0 && shares.len() < sequences {
            let most = left.min(self.envelope.context_tokens);
            let count = if evenly { left.div_ceil(sequences - shares.len()).min(most) } else { self.up_to(most) };
            let cached = self.up_to(self.envelope.context_tokens - count + 1) - 1;
            let shown = if self.model.config().image_token().is_some() { self.random.below(count + 1) } else { 0 };
            let drafted = (count - 1).min(self.envelope.draft_tokens).min(self.random.below(drafts + 1));
            let logit_rows = if all_want || self.random.below(2) == 0 { 1 + drafted } else { 0 };
            drafts -= logit_rows.saturating_sub(1);
            shares.push((count, cached, shown, logit_rows));
            left -= count;
        }
        let longest = self.envelope.context_tokens;
        let (tokens, positions) = (vec![0u32; longest], vec![[0u32; 3]; longest]);
        let blocks: Vec<u32> =
            (0..longest.div_ceil(BLOCK_TOKENS)).map(|block| (block % self.capacity.blocks) as u32).collect();
        let tables = vec![BlockTable::from(blocks); self.model.cache_groups().count()];
        let rows: Vec<u32> = (0..longest).map(|row| (row % self.capacity.cache_rows) as u32).collect();
        let pictures: Vec<[EmbeddingRows<'_>; 1]> = shares
            .iter()
            .map(|(.., shown, _)| [EmbeddingRows { tokens: 0..*shown, cache_rows: &rows[..*shown] }])
            .collect();
        let has_states = self.model.config().decoder().step_format().has_states;
        // All rows, no rows, or a random percentage of rows are scored: the last layer ends early
        // if at most half of the rows are wanted.
        let scored = [100, 0, self.random.below(101)][self.random.below(3)];
        let parts = shares.iter().zip(&pictures).map(|((count, cached, _, logit_rows), pictures)| SequencePart {
            tokens: &tokens[..*count],
            unseen: None,
            positions: &positions[..*count],
            cached_tokens: *cached,
            tables: &tables,
            pictures,
            logit_rows: *logit_rows,
            repeated: 0,
            scored: *count - *count * scored / 100..*count,
            state: has_states.then(|| StateSlots::in_place(0)),
        });
        let parts: Vec<_> = parts.collect();
        if self.model.config().decoder().draft_head.is_none() {
            return Pass::Step(StepBatch::pack(&parts));
        }
        let next = |part: &SequencePart<'_>| match part.logit_rows {
            0 => NextToken::Known { token: 0, cache_row: part.pictures[0].cache_rows.first().copied() },
            _ => NextToken::Chosen,
        };
        Pass::Step(StepBatch::pack_with_drafts(&parts, &parts.iter().map(next).collect::<Vec<_>>()))
    }

    fn launch(&mut self) -> Option<Pass> {
        let (merge, patch) = (self.model.config().merge()?, self.model.config().patch()?);
        let launch = self.envelope.launch_patches.min(merge.patches(self.capacity.cache_rows));
        let tile = self.model.config().tile();
        let most = merge.tokens(launch.min(self.envelope.picture_patches));
        if most < tile.map_or(1, |tile| tile.tokens(merge)) {
            return None;
        }
        let mut left = merge.tokens(launch);
        // The pass has many small pictures or a few large pictures, in a full
        // or partial encode batch.
        let most = if self.random.below(2) == 0 { 1 } else { most };
        let full = self.random.below(2) == 0;
        let mut pictures = Vec::new();
        let next = Cell::new(0u32);
        while left > 0 && (full || pictures.is_empty() || self.random.below(12) > 0) {
            let grid = tile.unwrap_or_else(|| {
                let rows = self.up_to(most.min(left));
                let columns = self.up_to(most.min(left) / rows);
                let side = merge.side();
                Grid { t: 1, h: (rows * side) as u32, w: (columns * side) as u32 }
            });
            if grid.tokens(merge) > left {
                break;
            }
            left -= grid.tokens(merge);
            let first = next.replace(next.get() + grid.tokens(merge) as u32);
            // A still picture, or a step of a video with fewer frames than the maximum.
            let frames = 1 + self.random.below(patch.frames);
            let patches = ResizedImage::blank(grid, PatchSize { frames, ..patch });
            pictures.push((patches, (first..next.get()).collect::<Vec<u32>>()));
        }
        let views: Vec<_> = pictures.iter().map(|(patches, rows)| (patches, rows.as_slice())).collect();
        Some(Pass::Encode(self.model.pack(&views)))
    }
}

fn peak(model: &Model, target: Target, pass: &Pass) -> Bytes {
    worst_cases::plan(model, target, pass).expect("shapes agree").workspace
}

fn no_pass_exceeds_the_worst_cases(model: &Model, target: Target, envelope: Envelope, seed: u64) {
    let (capacity, rank) = (CacheCapacity { blocks: 9, cache_rows: 90 }, model.rank());
    let worst_cases = worst_cases::worst_cases(model, &envelope, capacity);
    let largest = |is_step: bool| {
        let of_lane = worst_cases.iter().filter(|worst_case| matches!(worst_case.pass, Pass::Step(_)) == is_step);
        of_lane.map(|worst_case| peak(model, target, &worst_case.pass)).max().unwrap_or_default()
    };
    let (step_peak, launch_peak) = (largest(true), largest(false));
    let mut within = Within { model, envelope: envelope.clone(), capacity, random: Random::new(seed) };
    for _ in 0..20 {
        let step = within.step();
        let taken = peak(model, target, &step);
        assert!(
            taken <= step_peak,
            "a step takes {taken} but the worst cases take {step_peak}, in {envelope:?}: {step:?}"
        );
        let Some(launch) = within.launch() else { continue };
        let taken = peak(model, target, &launch);
        assert!(
            taken <= launch_peak,
            "a launch on {rank:?} takes {taken} but the worst cases take {launch_peak}, in {envelope:?}"
        );
    }
}

fn any_envelope() -> impl Strategy<Value = Envelope> {
    (1usize..300, 1usize..12, 1usize..200, 0usize..6, 4usize..200, 4usize..400).prop_map(
        |(context_tokens, sequences, step_tokens, draft_tokens, picture_patches, launch_patches)| Envelope {
            context_tokens,
            sequences,
            step_tokens,
            draft_tokens,
            picture_patches,
            pictures: 2,
            largest_pictures: 2,
            video_frames: 8,
            launch_patches,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_pass_in_an_envelope_exceeds_its_worst_cases(
        envelope in any_envelope(), threads in 1usize..4, seed in any::<u64>(),
    ) {
        let hopper = CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 };
        let targets = [Target::Cpu { threads }, Target::Cuda(hopper)];
        for (folder, target) in [QWEN2_5_VL, QWEN2, QWEN3, LLAMA, FP8[0], FP8[3]].iter().chain(&GEMMA).flat_map(|folder| targets.map(|target| (folder, target))) {
            let model = Model::plan(&bench::open(folder), &target).expect("the model can be planned");
            no_pass_exceeds_the_worst_cases(&model, target, envelope.clone(), seed);
        }
        for (folder, target) in HYBRIDS.iter().chain(&DRAFT_MODELS).flat_map(|folder| targets.map(|target| (folder, target))) {
            let projection = [DraftProjection::Decoder, DraftProjection::Int4][seed as usize % 2];
            let checkpoint = bench::open_with_head(folder).with_draft_projection(projection);
            let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
            no_pass_exceeds_the_worst_cases(&model, target, envelope.clone(), seed);
        }
        for (folder, of) in [(QWEN2_5_VL, 2), (QWEN3_VL[0], 4)] {
            for (rank, target) in Rank::all(of).flat_map(|rank| targets.map(|target| (rank, target))) {
                let model = Model::plan_rank(&bench::open(folder), &target, rank).expect("the model can be planned");
                no_pass_exceeds_the_worst_cases(&model, target, envelope.clone(), seed);
            }
        }
    }
}

#[test]
fn worst_cases_cover_all_workloads_of_the_models_family() {
    let capacity = CacheCapacity { blocks: 64, cache_rows: 1024 };
    let envelope = Envelope { draft_tokens: 2, ..Envelope::small() };
    for folder in [QWEN2, QWEN2_5_VL, QWEN3, LLAMA] {
        let model = Model::plan(&bench::open(folder), &Target::Cpu { threads: 1 }).expect("the model can be planned");
        let asked = model.config().workloads();
        let worst_cases = worst_cases::worst_cases(&model, &envelope, capacity);
        let stressed: Vec<Workload> = worst_cases.iter().flat_map(|worst_case| worst_case.workloads).copied().collect();
        for workload in asked {
            assert!(stressed.contains(workload), "{folder}: no worst case covers {workload:?}");
        }
        assert_eq!(asked.contains(&Workload::Encode), stressed.contains(&Workload::Encode), "{folder}");
    }
}
