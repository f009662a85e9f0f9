//! The memory that an engine serves from, leased by the profile and used by the lanes.

use std::{
    ops::Deref,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use bursar_budgets::{Address, Bytes, Device, DeviceError, Fence, HostMemory, Lease, Segment};
use bursar_kernels::{DType, HostStore, KvLayer, KvShape, Rank, StateLayer, StateShape, Tensor};
use bursar_model::{
    Model,
    blocks::layer_cache::LayerCache,
    flow::StepLayout,
    sampling::{SamplingBuffers, SamplingShape},
};

use crate::compute::graph::{Captured, GraphLimits};

/// All memory of an engine except the weights.
///
/// Unmapping the memory of a whole GPU takes a third of a second. If this value is dropped on a
/// tokio thread, another thread unmaps the memory. If it is dropped on a lane's thread, the memory
/// is unmapped when the drop returns.
pub struct EngineMemory(Option<EngineBuffers>);

pub struct EngineBuffers {
    pub step_workspace: Arc<Segment>,
    /// Buffers in which a step chooses tokens and from which the next step reads them.
    pub sampling: SamplingMemory,
    /// Temporaries of encoder batches. `None` for a model without pictures.
    pub vision_workspace: Option<Arc<Segment>>,
    /// Embeddings of pictures (encoder cache). `None` for a model without pictures.
    pub vision_cache: Option<VisionCache>,
    pub kv: KvMemory,
    /// Recurrent states. `None` for a model whose layers are all attention.
    pub states: Option<StateMemory>,
    /// Host memory for KV cache blocks that are evicted from the device. `None` if the
    /// user set no `swap_space`.
    pub host_kv: Option<HostTier>,
    /// Host memory for snapshots of states that are evicted from the device. `None` without
    /// `swap_space`, and for a model without states.
    pub host_states: Option<HostTier>,
    /// Host memory for embeddings that are evicted from the vision cache. `None` without
    /// `swap_space`, and for a model without pictures.
    pub host_pictures: Option<HostTier>,
    /// The inputs of captured steps, and the lease for the graphs. `None` on
    /// a device without graphs.
    pub graphs: Option<GraphInputs>,
    /// Memory for collectives between the ranks of several GPUs.
    pub exchange: Option<ExchangeMemory>,
}

impl EngineMemory {
    pub fn new(buffers: EngineBuffers) -> Self {
        EngineMemory(Some(buffers))
    }
}

impl EngineBuffers {
    /// Whether the lane with this workspace gets copy jobs: the step lane for blocks and states,
    /// and the vision lane for rows of pictures.
    pub(super) fn copies_in(&self, workspace: &Arc<Segment>) -> bool {
        if Arc::ptr_eq(workspace, &self.step_workspace) {
            self.host_kv.is_some() || self.host_states.is_some()
        } else {
            self.host_pictures.is_some()
        }
    }

    /// The cache of each decoder layer of `model` on its rank, over all backed blocks.
    pub fn layer_caches(&self, model: &Model) -> Vec<LayerCache> {
        self.layer_caches_with(model, self.kv.layers(model.rank()))
    }

    /// Like [`layer_caches`](Self::layer_caches), but over all
    /// [reserved](KvMemory::layers_reserved) blocks.
    pub fn layer_caches_reserved(&self, model: &Model) -> Vec<LayerCache> {
        self.layer_caches_with(model, self.kv.layers_reserved(model.rank()))
    }

    fn layer_caches_with(&self, model: &Model, kv: Vec<KvLayer>) -> Vec<LayerCache> {
        model.layer_caches(kv, self.states.iter().flat_map(|states| states.layers(model.rank())))
    }
}

impl Deref for EngineMemory {
    type Target = EngineBuffers;

    fn deref(&self) -> &EngineBuffers {
        self.0.as_ref().expect("the buffers exist until the value is dropped")
    }
}

impl Drop for EngineMemory {
    fn drop(&mut self) {
        let buffers = self.0.take();
        match tokio::runtime::Handle::try_current() {
            Ok(threads) => drop(threads.spawn_blocking(move || drop(buffers))),
            Err(_) => drop(buffers),
        }
    }
}

/// Buffers for sampling parameters, chosen tokens and reports. The newest tokens stay on the
/// device, where the next step reads them before the host receives them.
pub struct SamplingMemory {
    segment: Segment,
    shape: SamplingShape,
}

impl SamplingMemory {
    /// Bytes of the sampling buffers, in whole pages.
    pub fn bytes(shape: SamplingShape, page: Bytes) -> Bytes {
        DType::U32.bytes(shape.words()).round_up(page)
    }

    /// Wraps a segment that is backed for sampling buffers of `shape`.
    ///
    /// # Panics
    /// If fewer bytes are backed.
    pub fn over(segment: Segment, shape: SamplingShape) -> Self {
        let bytes = DType::U32.bytes(shape.words());
        assert!(bytes <= segment.backed(), "sampling buffers of {bytes} do not fit {}", segment.backed());
        SamplingMemory { segment, shape }
    }

    /// The buffers of one rank as tensors.
    pub fn buffers(&self, rank: Rank) -> SamplingBuffers<'_> {
        // SAFETY: the segment is backed for these words, page-aligned, and outlives the borrow.
        // Only the step lane uses it, one pass after another.
        let words =
            unsafe { Tensor::persistent(self.segment.address_on(rank.index()), [self.shape.words()], DType::U32) };
        SamplingBuffers::over(words, self.shape)
    }
}

/// The inputs of decode steps, captured or not. All sizes share the same addresses, because the
/// steps of a lane run in order. This type also holds the lease that pays for the graphs.
pub struct GraphInputs {
    segment: Segment,
    shape: GraphLimits,
    /// Lease of the bytes that the driver holds for the graphs, at addresses unknown to Bursar.
    paid: OnceLock<Lease>,
    /// The number of sizes that the current lane has captured.
    captured: Arc<Captured>,
}

impl GraphInputs {
    /// Wraps a segment that is backed for the inputs of the largest step of `shape`.
    ///
    /// # Panics
    /// If fewer bytes are backed.
    pub fn over(segment: Segment, shape: GraphLimits) -> Self {
        let bytes = DType::U32.bytes(shape.words());
        assert!(bytes <= segment.backed(), "inputs of {bytes} do not fit {}", segment.backed());
        GraphInputs { segment, shape, paid: OnceLock::new(), captured: Arc::default() }
    }

    pub fn shape(&self) -> GraphLimits {
        self.shape
    }

    /// The `[words]` u32 inputs of one rank for a step of `layout`.
    ///
    /// # Panics
    /// If the layout is larger than the layouts of [`shape`](Self::shape).
    pub fn tensor(&self, layout: &StepLayout, rank: Rank) -> Tensor<'_> {
        assert!(DType::U32.bytes(layout.words()) <= self.segment.backed(), "{layout:?}");
        // SAFETY: the segment is backed for the layout and outlives the borrow. Only the
        // step lane uses it, one pass after another.
        unsafe { Tensor::persistent(self.segment.address_on(rank.index()), [layout.words()], DType::U32) }
    }

    /// Keeps the lease that pays for the graphs for the lifetime of this value, which outlives
    /// every lane and therefore the graphs. If a lease is already kept, the new lease is dropped.
    pub fn pay(&self, lease: Lease) {
        drop(self.paid.set(lease));
    }

    pub fn captured(&self) -> &Arc<Captured> {
        &self.captured
    }

    /// Bytes leased for the graphs, once they are captured.
    pub fn paid(&self) -> Bytes {
        self.paid.get().map_or(Bytes::ZERO, Lease::bytes)
    }
}

/// Memory for collectives: a region on each rank, mapped by all ranks that can reach it.
pub struct ExchangeMemory {
    segment: Segment,
    largest: Bytes,
}

impl ExchangeMemory {
    /// Wraps a segment that is backed for exchanges of `largest` bytes, and maps it for all ranks
    /// that can reach it.
    ///
    /// # Errors
    /// The driver refuses to map the memory.
    pub fn over(segment: Segment, largest: Bytes) -> Result<Self, DeviceError> {
        segment.open_to_ranks()?;
        Ok(ExchangeMemory { segment, largest })
    }

    /// The address of the memory of each of `ranks` ranks.
    pub fn addresses(&self, ranks: usize) -> Vec<Address> {
        (0..ranks).map(|rank| self.segment.address_on(rank)).collect()
    }

    /// Bytes of the largest single exchange.
    pub fn largest(&self) -> Bytes {
        self.largest
    }
}

/// Rows of picture embeddings.
pub struct VisionCache {
    segment: Segment,
    rows: usize,
    width: usize,
    dtype: DType,
}

impl VisionCache {
    /// Wraps all backed bytes of a segment as rows of `width` elements.
    pub fn over(segment: Segment, width: usize, dtype: DType) -> Self {
        let rows = (segment.backed() / dtype.bytes(width)) as usize;
        VisionCache { segment, rows, width, dtype }
    }

    /// Bytes of one embedding.
    pub fn row_bytes(&self) -> Bytes {
        self.dtype.bytes(self.width)
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The `[rows, width]` embeddings on one rank.
    pub fn tensor(&self, rank: Rank) -> Tensor<'_> {
        // SAFETY: the segment is backed for that many rows and outlives the borrow. The vision
        // actor assigns a row to one picture at a time, and the step lane reads it only after the
        // vision lane has reported it written.
        unsafe { Tensor::persistent(self.segment.address_on(rank.index()), [self.rows, self.width], self.dtype) }
    }
}

/// The KV cache: one segment per layer, all paid for by one lease.
pub struct KvMemory {
    segments: Vec<Segment>,
    shape: KvShape,
    /// Number of backed blocks. The number may grow at any time. It is lowered only when no step
    /// uses the blocks that lose their memory.
    blocks: AtomicUsize,
    lease: Arc<Lease>,
}

impl KvMemory {
    /// Bytes of `blocks` blocks over all layers, in whole pages.
    pub fn bytes(shape: KvShape, blocks: usize, page: Bytes) -> Bytes {
        (shape.block_bytes() * blocks as u64).round_up(page) * shape.layers as u64
    }

    /// The number of blocks that `bytes` pay for.
    pub fn blocks_in(shape: KvShape, bytes: Bytes, page: Bytes) -> usize {
        let layer = (bytes / shape.layers as u64).round_down(page);
        (layer / shape.block_bytes()) as usize
    }

    /// Reserves addresses for `blocks_max` blocks and backs none of them. `lease` pays for blocks
    /// that are backed later.
    pub fn reserve(
        device: &Arc<dyn Device>,
        shape: KvShape,
        blocks_max: usize,
        lease: Arc<Lease>,
    ) -> Result<Self, DeviceError> {
        let bytes_max = shape.block_bytes() * blocks_max.max(1) as u64;
        let reserve = |_| Segment::reserve(device.clone(), bytes_max, lease.clone());
        let segments = (0..shape.layers).map(reserve).collect::<Result<_, _>>()?;
        Ok(KvMemory { segments, shape, blocks: AtomicUsize::new(0), lease })
    }

    /// Backs the first `blocks` blocks of every layer. The lease must pay for them. If the device
    /// refuses, layers that are already backed stay backed, and the number of blocks is unchanged.
    pub fn grow_to(&self, blocks: usize) -> Result<(), DeviceError> {
        for segment in &self.segments {
            segment.back_to(self.shape.block_bytes() * blocks as u64)?;
        }
        self.blocks.store(blocks, Ordering::Release);
        Ok(())
    }

    /// Unbacks all but the first `blocks` blocks of every layer. Captured graphs stay
    /// valid, because the addresses do not change. A step that uses a block after the
    /// last backed block faults.
    ///
    /// # Errors
    /// The device's error. Layers that are already unbacked stay unbacked.
    ///
    /// # Panics
    /// If the fence has not passed. The caller must create the fence after the last step, so only a
    /// bug can cause the panic.
    pub fn shrink_to(&self, blocks: usize, last_use: &Fence) -> Result<(), DeviceError> {
        self.blocks.fetch_min(blocks, Ordering::AcqRel);
        for segment in &self.segments {
            segment.shrink_to(self.shape.block_bytes() * blocks as u64, last_use)?;
        }
        Ok(())
    }

    /// The lease that pays for all layers.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    pub fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Acquire)
    }

    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// One view per layer of a rank, over the backed blocks.
    pub fn layers(&self, rank: Rank) -> Vec<KvLayer> {
        self.layers_of(self.blocks(), rank)
    }

    /// The number of blocks that have addresses.
    pub fn reserved_blocks(&self) -> usize {
        let reserved = self.segments.iter().map(Segment::reserved).min().unwrap_or(Bytes::ZERO);
        (reserved / self.shape.block_bytes()) as usize
    }

    /// One view per layer of a rank, over all reserved blocks, backed or not. Graphs use these
    /// views, because a graph stores the number of blocks at capture and stays valid when the cache
    /// grows or shrinks. The host passes only backed blocks to a graph, as it does to any step. An
    /// access to any other block would fault.
    pub fn layers_reserved(&self, rank: Rank) -> Vec<KvLayer> {
        self.layers_of(self.reserved_blocks(), rank)
    }

    fn layers_of(&self, blocks: usize, rank: Rank) -> Vec<KvLayer> {
        self.segments
            .iter()
            .map(|segment| {
                // SAFETY: at least the blocks that steps use are backed. The lane that calls
                // this method keeps the memory alive while the lane computes, and only the step
                // lane touches the KV cache.
                unsafe { KvLayer::new(segment.address_on(rank.index()), blocks, self.shape) }
            })
            .collect()
    }
}

/// Recurrent states of sequences and snapshots: one segment per layer, all paid for by one lease.
pub struct StateMemory {
    segments: Vec<Segment>,
    shape: StateShape,
    slots: usize,
}

impl StateMemory {
    /// Bytes of `slots` slots over all layers, in whole pages.
    pub fn bytes(shape: StateShape, slots: usize, page: Bytes) -> Bytes {
        (shape.slot_bytes() * slots as u64).round_up(page) * shape.layers as u64
    }

    /// Backs `slots` slots of every layer. `lease` must pay for them.
    ///
    /// # Errors
    /// The device refuses the memory.
    pub fn back(
        device: &Arc<dyn Device>,
        shape: StateShape,
        slots: usize,
        lease: Arc<Lease>,
    ) -> Result<Self, DeviceError> {
        let bytes = shape.slot_bytes() * slots as u64;
        let back = |_| {
            let segment = Segment::reserve(device.clone(), bytes, lease.clone())?;
            segment.back_to(bytes)?;
            Ok(segment)
        };
        Ok(StateMemory { segments: (0..shape.layers).map(back).collect::<Result<_, _>>()?, shape, slots })
    }

    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of one sequence's state over all layers.
    pub fn sequence_bytes(&self) -> Bytes {
        self.shape.sequence_bytes()
    }

    /// One view per layer of a rank.
    pub(super) fn layers(&self, rank: Rank) -> impl Iterator<Item = StateLayer> {
        self.segments.iter().map(move |segment| {
            // SAFETY: all slots are backed, segments are aligned to pages, and the lane that calls
            // this method keeps the memory alive while the lane computes. Only the step lane
            // touches the states.
            unsafe { StateLayer::new(segment.address_on(rank.index()), self.slots, self.shape) }
        })
    }
}

/// Slots in host memory for content that is evicted from the device: blocks of keys and values,
/// states, or rows of the vision cache. Each rank has separate memory for its part.
pub struct HostTier {
    ranks: Vec<HostMemory>,
    slot: HostSlot,
    slots: usize,
    /// Declared last, so that it is dropped after the memory.
    _lease: Lease,
}

/// The size of a slot in host memory, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSlot {
    /// Layers with a part in each slot.
    pub layers: usize,
    /// Bytes of one layer's part.
    pub layer_bytes: Bytes,
}

impl HostSlot {
    /// The slot for a block of keys and values.
    pub fn of_block(shape: KvShape) -> Self {
        HostSlot { layers: shape.layers, layer_bytes: shape.block_bytes() }
    }

    /// The slot for a state.
    pub fn of_state(shape: StateShape) -> Self {
        HostSlot { layers: shape.layers, layer_bytes: shape.slot_bytes() }
    }

    /// The slot for a row of the vision cache.
    pub fn of_row(bytes: Bytes) -> Self {
        HostSlot { layers: 1, layer_bytes: bytes }
    }

    pub fn bytes(self) -> Bytes {
        self.layer_bytes * self.layers as u64
    }
}

impl HostTier {
    /// Allocates host memory for `slots` slots of each rank of `device`. `lease` must pay for it.
    ///
    /// # Errors
    /// The host has too little memory.
    pub fn take(device: &Arc<dyn Device>, slot: HostSlot, slots: usize, lease: Lease) -> Result<Self, DeviceError> {
        let ranks = of_each_rank(device, slot.bytes() * slots as u64, &lease)?;
        Ok(HostTier { ranks, slot, slots, _lease: lease })
    }

    pub fn slot_count(&self) -> usize {
        self.slots
    }

    /// The slots of one rank.
    pub fn store(&self, rank: Rank) -> HostStore {
        let HostSlot { layers, layer_bytes } = self.slot;
        // SAFETY: the memory has this length and outlives every lane, because lanes keep it alive.
        // Only one lane copies from and to it: the step lane, or the vision lane for rows.
        unsafe { HostStore::new(self.ranks[rank.index()].address(), layers, self.slots, layer_bytes) }
    }
}

/// Allocates host memory of `bytes` for each rank of `device`.
fn of_each_rank(device: &Arc<dyn Device>, bytes: Bytes, lease: &Lease) -> Result<Vec<HostMemory>, DeviceError> {
    let ranks = match device.ranks() {
        [] => vec![device.clone().host_memory(bytes)?],
        ranks => ranks.iter().map(|rank| rank.clone().host_memory(bytes)).collect::<Result<_, _>>()?,
    };
    let taken = bytes * ranks.len() as u64;
    assert!(taken <= lease.bytes(), "slots of {taken} exceed a lease of {}", lease.bytes());
    Ok(ranks)
}
