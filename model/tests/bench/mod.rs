//! Where model stories run: a checkpoint loaded into leased memory of a host device, with caches and workspaces that
//! hold nothing but not-a-numbers until something is computed into them.
#![allow(dead_code, unused_imports, reason = "no story uses all of it")]

mod cut;
mod golden;
mod memory;
mod run;
mod sequence;

use std::{cell::RefCell, path::PathBuf};

use bursar_budgets::{Bytes, Class, Segment, Workspace};
use bursar_kernels::{Backend, Cpu, DType, KernelError, KvLayer, Scope, Tally, Tensor};
use bursar_model::{
    Model,
    blocks::decoder::{SCORE_ROWS, StepCaches},
    checkpoint::{Checkpoint, CheckpointSource},
    flow::{Patches, StepBatch},
};

pub use cut::cut;
pub use golden::{Case, greatest, picture, relative_error, video};
pub use memory::Memory;
pub use run::{Run, alone, assert_recorded_answer, assert_same_run, prefixes, together};
pub use sequence::{Sequence, Share};

/// Blocks of the caches of keys and values: more than all recorded cases take at once.
const BLOCKS: usize = 160;

/// Rows of the cache of picture embeddings.
const CACHE_ROWS: usize = 600;

/// A folder of this repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

/// Opens a checkpoint of this repository.
pub fn open(folder: &str) -> Checkpoint {
    Checkpoint::open(CheckpointSource::Folder(repository(folder))).unwrap_or_else(|error| panic!("{folder}: {error}"))
}

/// Numbers that a seed decides (xorshift, Marsaglia 2003).
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

    /// The numbers below `count` in disorder.
    pub fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|last| numbers.swap(last, self.below(last + 1)));
        numbers
    }
}

/// A loaded model and all it computes in.
pub struct Bench {
    pub checkpoint: Checkpoint,
    pub model: Model,
    pub cpu: Cpu,
    pub memory: Memory,
    kv: Vec<Segment>,
    cache: Segment,
    workspace: Workspace,
    free_blocks: RefCell<Vec<u32>>,
    free_rows: RefCell<Vec<u32>>,
}

impl Bench {
    /// Loads the checkpoint in `folder` of this repository.
    pub fn load(folder: &str, threads: usize) -> Self {
        let (checkpoint, cpu) = (open(folder), Cpu::new(threads));
        let planned = Model::plan(&checkpoint, cpu.target()).expect("the checkpoint can be planned");
        let memory = Memory::new(Bytes::mib(256));
        let weights = memory.poisoned(Class::Weights, planned.weight_bytes());
        let model = Model::load(&checkpoint, &cpu, weights, |_, _| {}).expect("the checkpoint loads");
        assert_eq!(model.weight_bytes(), planned.weight_bytes());
        let shape = model.kv_shape(cpu.target());
        let layer = |_| memory.poisoned(Class::Kv, shape.block_bytes() * BLOCKS as u64);
        let kv = (0..shape.layers).map(layer).collect();
        let row = model.embedding_bytes(cpu.target());
        let cache = memory.poisoned(Class::VisionCache, row * CACHE_ROWS as u64);
        let workspace = Workspace::over(memory.poisoned(Class::StepWorkspace, Bytes::mib(48)));
        let mut random = Random::new(7);
        let free_blocks = RefCell::new(random.shuffled(BLOCKS));
        let free_rows = RefCell::new(random.shuffled(CACHE_ROWS));
        Bench { checkpoint, model, cpu, memory, kv, cache, workspace, free_blocks, free_rows }
    }

    /// One view a layer on the keys and values.
    pub fn layers(&self) -> Vec<KvLayer> {
        let shape = self.model.kv_shape(self.cpu.target());
        // SAFETY: so many blocks are backed for as long as the bench lives, and a story is one thread.
        self.kv.iter().map(|segment| unsafe { KvLayer::new(segment.address(), BLOCKS, shape) }).collect()
    }

    /// `[CACHE_ROWS, hidden]`
    pub fn cache(&self) -> Tensor<'static> {
        let shape = [CACHE_ROWS, self.model.config().decoder().hidden];
        // SAFETY: so many rows are backed for as long as the bench lives, and a story is one thread.
        unsafe { Tensor::persistent(self.cache.address(), shape, self.cpu.target().activation()) }
    }

    /// No rows: the host knows all tokens here.
    pub fn previous(&self) -> Tensor<'static> {
        // SAFETY: a tensor without rows has no element that could be touched.
        unsafe { Tensor::persistent(self.cache.address(), [0], DType::U32) }
    }

    /// Encodes pictures in one launch; gives the rows of the cache that each picture's embeddings took.
    pub fn encode(&self, pictures: &[&Patches]) -> Vec<Vec<u32>> {
        let merged = self.model.config().merged_patches().expect("a family with pictures");
        let mut free = self.free_rows.borrow_mut();
        let rows: Vec<Vec<u32>> = pictures
            .iter()
            .map(|patches| {
                let kept = free.len() - patches.grid.patches() / merged;
                free.split_off(kept)
            })
            .collect();
        let views: Vec<_> = pictures.iter().zip(&rows).map(|(patches, rows)| (*patches, rows.as_slice())).collect();
        let batch = self.model.pack(&views);
        self.pass(|scope| self.model.encode(scope, &batch, &mut self.cache())).expect("the launch runs");
        rows
    }

    /// Rows of the cache as they are.
    pub fn embeddings(&self, rows: &[u32]) -> Vec<f32> {
        self.pass(|scope| {
            let rows = scope.upload([rows.len()], rows)?;
            scope.download(&scope.gather_rows(&self.cache(), &rows)?)
        })
        .expect("the rows are in the cache")
    }

    /// Gives rows back, to be written again by another launch.
    pub fn forget(&self, rows: Vec<Vec<u32>>) {
        self.free_rows.borrow_mut().extend(rows.into_iter().flatten());
    }

    /// A sequence at the start of its prompt, in blocks that lie apart and in disorder.
    pub fn sequence(&self, case: &Case, picture_rows: &[Vec<u32>]) -> Sequence {
        let ids = case.prompt_ids(&self.checkpoint);
        let layout = self.model.config().lay_out(ids, &case.visuals).expect("it is laid out");
        let blocks = Sequence::blocks_for(layout.tokens.len());
        let mut free = self.free_blocks.borrow_mut();
        let kept = free.len() - blocks;
        Sequence::new(layout, picture_rows.to_vec(), free.split_off(kept))
    }

    /// Gives a sequence's blocks back, stale as they are.
    pub fn end(&self, sequence: Sequence) {
        self.free_blocks.borrow_mut().extend(sequence.into_blocks());
    }

    /// Runs one step over the next tokens of some sequences. Gives a row of logits for each share that wants one.
    pub fn step(&self, shares: &mut [Share<'_>]) -> Vec<Vec<f32>> {
        self.step_and_score(shares).0
    }

    /// The same, and a row of logits for each token of a share that is scored.
    pub fn step_and_score(&self, shares: &mut [Share<'_>]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let pictures: Vec<_> = shares.iter().map(Share::pictures).collect();
        let parts: Vec<_> = shares.iter().zip(&pictures).map(|(share, pictures)| share.part(pictures)).collect();
        let batch = StepBatch::pack(&parts);
        let (layers, cache) = (self.layers(), self.cache());
        let previous = self.previous();
        let caches = StepCaches { layers: &layers, pictures: Some(&cache), previous: &previous };
        let vocabulary = self.model.config().decoder().vocabulary;
        let mut scores = Vec::new();
        let logits = self.pass(|scope| {
            let logits = self.model.step(scope, &batch, &caches, |scope, rows| {
                assert!(rows.rows() <= SCORE_ROWS);
                scores.extend(scope.download::<f32>(rows)?);
                Ok(())
            })?;
            assert_eq!(logits.shape(), [batch.logit_rows.len(), vocabulary].into());
            scope.download::<f32>(&logits)
        });
        shares.iter_mut().for_each(Share::advance);
        let logits = logits.expect("the step runs");
        assert!(logits.iter().chain(&scores).all(|logit| logit.is_finite()), "poison reached the logits");
        let rows = |logits: Vec<f32>| logits.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect();
        (rows(logits), rows(scores))
    }

    /// Runs the rest of the prompt in chunks of these sizes, again and again; gives the logits at each chunk's end.
    pub fn prefill(&self, sequence: &mut Sequence, sizes: &[usize]) -> Vec<Vec<f32>> {
        let mut sizes = sizes.iter().copied().cycle();
        let mut logits = Vec::new();
        while sequence.prompt_left() > 0 {
            let count = sizes.next().expect("a cycle has no end").min(sequence.prompt_left());
            logits.extend(self.step(&mut [sequence.share(count)]));
        }
        logits
    }

    /// Chooses `count` tokens greedily after a prompt whose last logits are given. Gives the logits that each won.
    pub fn decode(&self, sequence: &mut Sequence, mut logits: Vec<f32>, count: usize) -> Vec<Vec<f32>> {
        let mut won = Vec::new();
        for _ in 0..count {
            sequence.push(greatest(&logits));
            won.push(std::mem::take(&mut logits));
            // The last chosen token is run as well: a step too many harms nothing.
            logits = self.step(&mut [sequence.share(1)]).remove(0);
        }
        won
    }

    /// A pass in poisoned memory.
    pub fn pass<T>(&self, run: impl FnOnce(&Scope<'_, Cpu>) -> Result<T, KernelError>) -> Result<T, KernelError> {
        self.poison_workspace();
        let tally = Tally::default();
        run(&Scope::new(&self.cpu, &self.workspace, &tally))
    }

    fn poison_workspace(&self) {
        let segment = self.workspace.segment().expect("this workspace has memory");
        // What earlier passes wrote is enough: the rest is poisoned still.
        memory::poison(segment, self.workspace.high_water());
    }
}
