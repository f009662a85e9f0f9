//! The demo model without actors, in leased memory, for running single steps or encoder batches.

use std::sync::Arc;

use bursar_budgets::{
    Bytes, Class, Device, Effect, HostConfig, HostDevice, Input, Lease, Ledger, LedgerConfig, Owner, ReleaseNote,
    ReleaseNotes, Request, RequestId, Segment, Workspace,
};
use bursar_kernels::{BLOCK_TOKENS, Backend, Cpu, DType, KvLayer, Scope, Tensor, WorkCounter};
use bursar_model::{
    Model, blocks::decoder::StepCaches, checkpoint::Checkpoint, demo, flow::BlockTable, flow::LogitsOf,
    flow::ResizedImage, flow::SequencePart, flow::StepBatch, registry::EncoderBatch,
};

/// Number of KV blocks.
const BLOCKS: usize = 1024;
/// Rows of picture embeddings in the vision cache.
const CACHE_ROWS: usize = 1024;

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A loaded model with all the memory that it computes in.
pub struct Stage {
    pub checkpoint: Checkpoint,
    pub model: Model,
    cpu: Cpu,
    kv: Vec<Segment>,
    cache: Segment,
    workspace: Workspace,
}

fn segment(device: &Arc<dyn Device>, bytes: Bytes) -> Segment {
    let bytes = bytes.round_up(device.page());
    let mut ledger = Ledger::new(LedgerConfig::new(bytes));
    let request = Request::new(Owner::new("bench", 0), Class::external("bench"), "user", bytes);
    let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
    let [Effect::Granted(grant)] = &effects[..] else { panic!("{effects:?}") };
    let lease = Lease::issue(grant, Arc::new(Nobody));
    let segment = Segment::reserve(device.clone(), bytes, lease).expect("addresses");
    segment.back_to(bytes).expect("memory");
    segment
}

impl Stage {
    pub fn demo(threads: usize) -> Self {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let cpu = Cpu::new(threads);
        let planned = Model::plan(&checkpoint, cpu.target()).expect("the model can be planned");
        let device: Arc<dyn Device> =
            Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(512))).expect("host memory"));
        let weights = segment(&device, planned.weight_bytes());
        let model = Model::load(&checkpoint, &cpu, weights, |_, _| std::ops::ControlFlow::Continue(()))
            .expect("the model loads");
        let shape = model.kv_shape(cpu.target());
        let kv = (0..shape.layers).map(|_| segment(&device, shape.block_bytes() * BLOCKS as u64)).collect();
        let cache = segment(&device, model.picture_row_bytes(cpu.target()) * CACHE_ROWS as u64);
        let workspace = Workspace::over(segment(&device, Bytes::mib(64)));
        Stage { checkpoint, model, cpu, kv, cache, workspace }
    }

    /// A step in which each of `sequences` sequences decodes one token after `context` tokens.
    pub fn decode_batch(&self, sequences: usize, context: usize) -> StepBatch {
        let each = (context + 1).div_ceil(BLOCK_TOKENS);
        assert!(sequences * each <= BLOCKS, "the KV cache has enough blocks");
        let blocks: Vec<u32> = (0..(sequences * each) as u32).collect();
        let position = [[context as u32; 3]];
        let tables: Vec<[BlockTable; 1]> = blocks.chunks_exact(each).map(|blocks| [blocks.to_vec().into()]).collect();
        let parts: Vec<_> = tables
            .iter()
            .map(|tables| SequencePart {
                tokens: &[7],
                unseen: None,
                positions: &position,
                cached_tokens: context,
                tables,
                pictures: &[],
                logit_rows: 1,
                repeated: 0,
                scored: 0..0,
                state: None,
            })
            .collect();
        StepBatch::pack(&parts)
    }

    /// Runs a step and samples greedily.
    pub fn step(&self, batch: &StepBatch) -> Vec<u32> {
        let shape = self.model.kv_shape(self.cpu.target());
        // SAFETY: the `BLOCKS` blocks of each layer stay backed as long as the stage lives, and
        // only this thread accesses them.
        let kv = self.kv.iter().map(|layer| unsafe { KvLayer::new(layer.address(), BLOCKS, shape) });
        let layers = self.model.layer_caches(kv, []);
        let cache = self.cache();
        // SAFETY: the tensor has no rows, so no element is accessed. The step reads no tokens of a
        // previous step, because the host knows all tokens here.
        let previous = unsafe { Tensor::persistent(self.cache.address(), [0], DType::U32) };
        let caches = StepCaches { layers: &layers, pictures: Some(&cache), previous: &previous };
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.cpu, &self.workspace, &counter);
        let logits =
            self.model.step(&scope, batch, &caches, LogitsOf::AllRanks, None, |_, _| Ok(())).expect("the step runs");
        scope.download(&scope.argmax(&logits).expect("logits")).expect("tokens")
    }

    pub fn picture_batch(&self, patches: &ResizedImage) -> EncoderBatch {
        let merge = self.model.config().merge().expect("a family with pictures");
        let rows: Vec<u32> = (0..patches.grid.tokens(merge) as u32).collect();
        self.model.pack(&[(patches, &rows)])
    }

    /// Runs one encoder batch.
    pub fn encode(&self, batch: &EncoderBatch) {
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.cpu, &self.workspace, &counter);
        self.model.encode(&scope, batch, &mut self.cache()).expect("the encoder runs");
    }

    fn cache(&self) -> Tensor<'static> {
        let shape = [CACHE_ROWS, self.model.config().embedding_layout().width()];
        // SAFETY: the `CACHE_ROWS` rows stay backed as long as the stage lives, and only this
        // thread accesses them.
        unsafe { Tensor::persistent(self.cache.address(), shape, self.cpu.target().activation()) }
    }
}
