//! The bench that model tests run on: a checkpoint loaded into leased memory of a device. Caches
//! and workspaces contain only NaN until a computation writes to them.
#![allow(dead_code, unused_imports, reason = "no story uses all of it")]

mod caches;
mod cut;
mod drafts;
mod golden;
mod gpu;
mod memory;
mod ranks;
mod run;
mod sequence;

use std::{cell::RefCell, path::PathBuf, sync::Arc};

use bursar_budgets::{Bytes, Class, Segment, Workspace};
use bursar_kernels::{Backend, Cpu, DType, Element, KernelError, Scope, Tensor, WorkCounter};
use bursar_model::{
    Model,
    blocks::{decoder::StepCaches, layer_cache::LayerCache},
    checkpoint::{Checkpoint, CheckpointSource, RandomCheckpoint},
    flow::{LogitsOf, PromptLayout, ResizedImage, SCORE_ROWS, StepBatch},
};
use half::{bf16, f16};

pub use caches::Caches;
pub use cut::cut;
pub use drafts::Drafted;
pub use golden::{Case, greatest, picture, relative_error, video};
pub use gpu::{Gpu, GpuLock, gpu};
pub use memory::Memory;
pub use ranks::on_ranks;
pub use run::{Run, alone, assert_recorded, assert_same_run, encode, prefixes, together, whatever_is_wanted};
pub use sequence::{Sequence, SequenceChunk};

/// Memory limits of a bench.
#[derive(Clone, Copy)]
pub struct BenchMemory {
    /// Total bytes of device memory, including the weights.
    pub capacity: Bytes,
    /// Blocks of the KV caches, for each cache group.
    pub blocks: usize,
    /// Rows of the cache of picture embeddings.
    pub cache_rows: usize,
    /// Maximum workspace bytes of one pass.
    pub workspace: Bytes,
    /// Maximum bytes that GPU ranks exchange in one launch: at least the size of a row of logits.
    pub at_once: Bytes,
}

/// Smaller than the residual stream of a prompt, so that some collectives need several launches.
const AT_ONCE: Bytes = Bytes::kib(64);

impl BenchMemory {
    /// Limits above the needs of the largest recorded case.
    pub const GOLDEN: BenchMemory = BenchMemory {
        capacity: Bytes::mib(256),
        blocks: 160,
        cache_rows: 900,
        workspace: Bytes::mib(48),
        at_once: AT_ONCE,
    };

    /// [`BenchMemory::GOLDEN`] with more memory, for the scratch space of the GEMM library.
    pub const GOLDEN_ON_GPU: BenchMemory =
        BenchMemory { capacity: Bytes::mib(512), workspace: Bytes::mib(96), ..BenchMemory::GOLDEN };
}

/// The token that an answer continues with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum GoesOn {
    /// The token with the largest logit.
    Chosen,
    /// The recorded token, regardless of the logits. In a narrow type, a near-tie may resolve
    /// differently, and all later text would differ.
    Recorded,
}

/// A folder of this repository.
pub fn repository(path: &str) -> PathBuf {
    if path == "model/demo/checkpoint" {
        return bursar_golden::demo_checkpoint();
    }
    let path = path.strip_prefix("tests/golden/");
    bursar_golden::path(path.expect("checkpoints are the demo's and those in tests/golden"))
}

/// Opens a checkpoint of this repository.
pub fn open(folder: &str) -> Checkpoint {
    Checkpoint::open(CheckpointSource::Folder(repository(folder))).unwrap_or_else(|error| panic!("{folder}: {error}"))
}

/// The recorded draft models, and the checkpoints whose tokens they draft.
const DRAFT_MODELS: [(&str, &str); 4] = [
    ("tests/golden/eagle3", "tests/golden/llama"),
    ("tests/golden/eagle3_vl", "tests/golden/qwen3_vl"),
    ("tests/golden/gemma4_assistant", "tests/golden/gemma4_sharing"),
    ("tests/golden/gemma4_assistant_vl", "tests/golden/gemma4"),
];

/// Opens a checkpoint of this repository with its draft head. For the folder of a draft model, opens
/// the checkpoint whose tokens it drafts.
pub fn open_with_head(folder: &str) -> Checkpoint {
    let Some((_, target)) = DRAFT_MODELS.iter().find(|(head, _)| *head == folder) else {
        return open(folder).with_draft_head(true);
    };
    let head = CheckpointSource::Folder(repository(folder));
    open(target).with_draft_model(&head).expect("the head opens").with_draft_head(true)
}

/// Opens a checkpoint with random weights.
pub fn open_random(random: RandomCheckpoint) -> Checkpoint {
    Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens")
}

/// Pseudo-random numbers from a seed (xorshift, Marsaglia 2003).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % end as u64) as usize
    }

    /// The numbers below `count`, shuffled.
    pub fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|last| numbers.swap(last, self.below(last + 1)));
        numbers
    }
}

/// A loaded model and all memory that it computes in.
pub struct Bench<B = Cpu> {
    pub checkpoint: Checkpoint,
    pub model: Model,
    pub goes_on: GoesOn,
    pub backend: B,
    pub memory: Memory,
    sizes: BenchMemory,
    caches: Caches,
    cache: Segment,
    workspace: Workspace,
    free_blocks: RefCell<Vec<u32>>,
    free_rows: RefCell<Vec<u32>>,
    free_states: RefCell<Vec<u32>>,
}

impl Bench {
    /// Loads the checkpoint in `folder` of this repository.
    pub fn load(folder: &str, threads: usize) -> Self {
        Bench::of(open(folder), threads)
    }

    pub fn of(checkpoint: Checkpoint, threads: usize) -> Self {
        Bench::on(checkpoint, Cpu::new(threads), Memory::new(BenchMemory::GOLDEN.capacity), BenchMemory::GOLDEN)
    }
}

impl<B: Backend> Bench<B> {
    /// Loads `checkpoint` for `backend` into `memory` of its device.
    pub fn on(checkpoint: Checkpoint, backend: B, memory: Memory, sizes: BenchMemory) -> Self {
        let target = *backend.target();
        let planned = Model::plan_rank(&checkpoint, &target, backend.rank()).expect("the checkpoint can be planned");
        let weights = memory.poisoned(&backend, Class::Weights, planned.weight_bytes());
        let model = Model::load(&checkpoint, &backend, weights, |_, _| std::ops::ControlFlow::Continue(()))
            .expect("the checkpoint loads");
        assert_eq!(model.weight_bytes(), planned.weight_bytes());
        Bench::around(checkpoint, model, backend, memory, sizes)
    }

    /// Adds caches and a workspace to a loaded model.
    pub fn around(checkpoint: Checkpoint, model: Model, backend: B, memory: Memory, sizes: BenchMemory) -> Self {
        let target = *backend.target();
        let blocks = sizes.blocks * model.cache_groups().count();
        let caches = Caches::poisoned(&memory, &backend, &model, blocks);
        let row = model.picture_row_bytes(&target);
        let cache = memory.poisoned(&backend, Class::VisionCache, row * sizes.cache_rows as u64);
        let workspace = Workspace::over(memory.poisoned(&backend, Class::StepWorkspace, sizes.workspace));
        let mut random = Random::new(7);
        let free_blocks = RefCell::new(random.shuffled(blocks));
        let free_rows = RefCell::new(random.shuffled(sizes.cache_rows));
        let free_states = RefCell::new(random.shuffled(Caches::STATES));
        let goes_on = GoesOn::Chosen;
        Bench {
            checkpoint,
            model,
            goes_on,
            backend,
            memory,
            sizes,
            caches,
            cache,
            workspace,
            free_blocks,
            free_rows,
            free_states,
        }
    }

    /// The cache of each layer of the decoder.
    pub fn layers(&self) -> Vec<LayerCache> {
        self.caches.layers(&self.model, self.backend.target())
    }

    /// `[cache rows, embedding_layout().width()]`
    pub fn cache(&self) -> Tensor<'static> {
        let shape = [self.sizes.cache_rows, self.model.config().embedding_layout().width()];
        // SAFETY: the rows are backed for as long as the bench lives, and only the
        // test's thread accesses them.
        unsafe { Tensor::persistent(self.cache.address(), shape, self.backend.target().activation()) }
    }

    /// A tensor without rows, because the host knows all tokens in these tests.
    pub fn previous(&self) -> Tensor<'static> {
        // SAFETY: a tensor without rows has no element that could be accessed.
        unsafe { Tensor::persistent(self.cache.address(), [0], DType::U32) }
    }

    /// Encodes pictures in one batch. Returns the cache rows of each picture's embeddings.
    pub fn encode(&self, pictures: &[&ResizedImage]) -> Vec<Vec<u32>> {
        let merge = self.model.config().merge().expect("a family with pictures");
        let mut free = self.free_rows.borrow_mut();
        let rows: Vec<Vec<u32>> = pictures
            .iter()
            .map(|patches| {
                let kept = free.len() - patches.grid.tokens(merge);
                free.split_off(kept)
            })
            .collect();
        let views: Vec<_> = pictures.iter().zip(&rows).map(|(patches, rows)| (*patches, rows.as_slice())).collect();
        let batch = self.model.pack(&views);
        self.pass(|scope| self.model.encode(scope, &batch, &mut self.cache())).expect("the launch runs");
        rows
    }

    /// The content of cache rows.
    pub fn embeddings(&self, rows: &[u32]) -> Vec<f32> {
        self.pass(|scope| {
            let rows = scope.upload([rows.len()], rows)?;
            let found = scope.gather_rows(&self.cache(), &rows)?;
            match found.dtype() {
                DType::BF16 => widened(scope, &found, bf16::to_f32),
                DType::F16 => widened(scope, &found, f16::to_f32),
                _ => scope.download(&found),
            }
        })
        .expect("the rows are in the cache")
    }

    /// Frees cache rows for the next batch.
    pub fn forget(&self, rows: Vec<Vec<u32>>) {
        self.free_rows.borrow_mut().extend(rows.into_iter().flatten());
    }

    /// A sequence at the start of its prompt, in scattered and shuffled blocks.
    pub fn sequence(&self, case: &Case, picture_rows: &[Vec<u32>]) -> Sequence {
        let ids = case.prompt_ids(&self.checkpoint);
        self.start(self.model.config().lay_out(ids, &case.visuals).expect("the prompt is laid out"), picture_rows)
    }

    /// A sequence at the start of the prompt `layout`.
    pub fn start(&self, layout: PromptLayout, picture_rows: &[Vec<u32>]) -> Sequence {
        let groups = self.model.cache_groups();
        let blocks = Sequence::blocks_for(layout.tokens.len()) * groups.count();
        let mut free = self.free_blocks.borrow_mut();
        let kept = free.len() - blocks;
        let format = self.model.config().decoder().step_format();
        let state = format.has_states.then(|| self.free_states.borrow_mut().pop().expect("a free state"));
        Sequence::new(layout, picture_rows.to_vec(), groups, &free.split_off(kept), state)
            .with_whole_pictures(format.whole_pictures)
    }

    /// Frees the blocks and the state of a sequence, with their stale content.
    pub fn end(&self, sequence: Sequence) {
        let (blocks, state) = sequence.into_memory();
        self.free_blocks.borrow_mut().extend(blocks);
        self.free_states.borrow_mut().extend(state);
    }

    /// Runs one step over the next tokens of some sequences. Returns the rows of logits that the
    /// chunks ask for, in the order of the chunks.
    pub fn step(&self, chunks: &mut [SequenceChunk<'_>]) -> Vec<Vec<f32>> {
        self.step_and_score(chunks).0
    }

    /// Same as [`step`](Bench::step), but also returns a row of logits for each scored token.
    pub fn step_and_score(&self, chunks: &mut [SequenceChunk<'_>]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let pictures: Vec<_> = chunks.iter().map(SequenceChunk::pictures).collect();
        let parts: Vec<_> = chunks.iter().zip(&pictures).map(|(chunk, pictures)| chunk.part(pictures)).collect();
        let batch = StepBatch::pack(&parts);
        let (layers, cache) = (self.layers(), self.cache());
        let previous = self.previous();
        let caches = StepCaches { layers: &layers, pictures: Some(&cache), previous: &previous };
        let vocabulary = self.model.config().decoder().vocabulary;
        let mut scores = Vec::new();
        let logits = self.pass(|scope| {
            let logits = self.model.step(scope, &batch, &caches, LogitsOf::AllRanks, None, |scope, rows| {
                assert!(rows.rows() <= SCORE_ROWS);
                scores.extend(downloaded(scope, rows)?);
                Ok(())
            })?;
            assert_eq!(logits.shape(), [batch.logit_rows.len(), vocabulary].into());
            downloaded(scope, &logits)
        });
        chunks.iter_mut().for_each(SequenceChunk::advance);
        let logits = logits.expect("the step runs");
        assert!(logits.iter().chain(&scores).all(|logit| logit.is_finite()), "poisoned memory reached the logits");
        let rows = |logits: Vec<f32>| logits.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect();
        (rows(logits), rows(scores))
    }

    /// Runs the rest of the prompt in chunks of these sizes, repeated. Returns the logits at the
    /// end of each chunk.
    pub fn prefill(&self, sequence: &mut Sequence, sizes: &[usize]) -> Vec<Vec<f32>> {
        let mut sizes = sizes.iter().copied().cycle();
        let mut logits = Vec::new();
        while sequence.prompt_left() > 0 {
            let count = sizes.next().expect("the cycle of sizes is endless").min(sequence.prompt_left());
            logits.extend(self.step(&mut [sequence.next_chunk(count)]));
        }
        logits
    }

    /// Answers `case` with `count` tokens after a prompt with the given last logits. Returns the
    /// logits of each token.
    pub fn decode(&self, sequence: &mut Sequence, case: &Case, mut logits: Vec<f32>, count: usize) -> Vec<Vec<f32>> {
        let mut won = Vec::new();
        for index in 0..count {
            sequence.push(self.next(case, index, &logits));
            won.push(std::mem::take(&mut logits));
            // The token that was chosen last runs too. The additional step does no harm.
            logits = self.step(&mut [sequence.next_chunk(1)]).remove(0);
        }
        won
    }

    /// The token with this index in the answer, from its logits.
    pub fn next(&self, case: &Case, index: usize, logits: &[f32]) -> u32 {
        match self.goes_on {
            GoesOn::Chosen => greatest(logits),
            GoesOn::Recorded => case.greedy_tokens()[index],
        }
    }

    /// Runs a pass in poisoned memory.
    pub fn pass<T>(&self, run: impl FnOnce(&Scope<'_, B>) -> Result<T, KernelError>) -> Result<T, KernelError> {
        self.poison_workspace();
        let counter = WorkCounter::default();
        run(&Scope::new(&self.backend, &self.workspace, &counter))
    }

    fn poison_workspace(&self) {
        let segment = self.workspace.segment().expect("this workspace has memory");
        // Only the bytes that earlier passes wrote are poisoned again. The rest is still poisoned.
        memory::poison(&self.backend, segment, self.workspace.high_water());
    }
}

/// Downloads a tensor of a narrow type and widens it to f32.
fn widened<B: Backend, E: Element>(
    scope: &Scope<'_, B>,
    found: &Tensor<'_>,
    widen: fn(E) -> f32,
) -> Result<Vec<f32>, KernelError> {
    Ok(scope.download::<E>(found)?.into_iter().map(widen).collect())
}

/// Downloads rows of logits, which may have gaps between them on a device.
fn downloaded<B: Backend>(scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<Vec<f32>, KernelError> {
    let row = |row: usize| scope.download::<f32>(&logits.row_range(row..row + 1));
    Ok((0..logits.rows()).map(row).collect::<Result<Vec<_>, _>>()?.concat())
}
