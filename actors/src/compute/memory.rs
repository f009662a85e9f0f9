//! The memory that an engine serves from: leased by the profile, held for the lanes.

use std::{
    ops::Deref,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use bursar_budgets::{Bytes, Device, DeviceError, Fence, Lease, Segment};
use bursar_kernels::{DType, KvLayer, KvShape, Tensor};
use bursar_model::{
    flow::StepLayout,
    sampling::{SamplingBuffers, SamplingShape},
};

use crate::compute::graph::{Captured, GraphShape};

/// Everything but the weights.
///
/// To take a whole card back takes a third of a second, so where this is dropped on a thread of tokio another thread does
/// that. On a lane's own thread it is done when the drop is.
pub struct EngineMemory(Option<EngineParts>);

/// What is in it.
pub struct EngineParts {
    /// Temporaries of steps.
    pub step_workspace: Arc<Segment>,
    /// Where steps choose, for the steps behind them.
    pub sampling: SamplingMemory,
    /// Temporaries of vision launches; none for a model that takes no pictures.
    pub vision_workspace: Option<Arc<Segment>>,
    /// Embeddings of pictures; likewise.
    pub vision_cache: Option<VisionCache>,
    /// Keys and values.
    pub kv: KvMemory,
    /// What captured steps read, and what pays for them; none where there are no graphs.
    pub graphs: Option<GraphInputs>,
}

impl EngineMemory {
    /// All of it together.
    pub fn new(parts: EngineParts) -> Self {
        EngineMemory(Some(parts))
    }
}

impl Deref for EngineMemory {
    type Target = EngineParts;

    fn deref(&self) -> &EngineParts {
        self.0.as_ref().expect("it is there until it drops")
    }
}

impl Drop for EngineMemory {
    fn drop(&mut self) {
        let parts = self.0.take();
        match tokio::runtime::Handle::try_current() {
            Ok(threads) => drop(threads.spawn_blocking(move || drop(parts))),
            Err(_) => drop(parts),
        }
    }
}

/// Where steps ask for their choices, make them and report them. What the newest has chosen stays on the device, where
/// the next step reads it before the host has.
pub struct SamplingMemory {
    segment: Segment,
    shape: SamplingShape,
}

impl SamplingMemory {
    /// Bytes of whole pages that sampling buffers take.
    pub fn bytes(shape: SamplingShape, page: Bytes) -> Bytes {
        DType::U32.bytes(shape.words()).round_up(page)
    }

    /// A segment that is backed for sampling buffers of `shape`.
    ///
    /// # Panics
    /// If it is backed for less.
    pub fn over(segment: Segment, shape: SamplingShape) -> Self {
        let bytes = DType::U32.bytes(shape.words());
        assert!(bytes <= segment.backed(), "sampling buffers of {bytes} in {}", segment.backed());
        SamplingMemory { segment, shape }
    }

    /// The buffers.
    pub fn buffers(&self) -> SamplingBuffers<'_> {
        // SAFETY: the segment is backed for it, starts a page and lives as long as the borrow; only the step lane touches
        // it, one pass after the other.
        let words = unsafe { Tensor::persistent(self.segment.address(), [self.shape.words()], DType::U32) };
        SamplingBuffers::over(words, self.shape)
    }
}

/// Where steps that decode alone find their inputs, captured or not: one place for all sizes, as the steps of a lane are in
/// order. And what pays for the graphs themselves.
pub struct GraphInputs {
    segment: Segment,
    shape: GraphShape,
    /// The driver holds as much for the graphs, at no address of ours.
    paid: OnceLock<Lease>,
    /// How many sizes the lane that lives has captured.
    captured: Arc<Captured>,
}

impl GraphInputs {
    /// A segment that is backed for the inputs of the largest step of `shape`.
    ///
    /// # Panics
    /// If it is backed for less.
    pub fn over(segment: Segment, shape: GraphShape) -> Self {
        let bytes = DType::U32.bytes(shape.layout(shape.sequences).words());
        assert!(bytes <= segment.backed(), "inputs of {bytes} in {}", segment.backed());
        GraphInputs { segment, shape, paid: OnceLock::new(), captured: Arc::default() }
    }

    /// What the layouts follow from.
    pub fn shape(&self) -> GraphShape {
        self.shape
    }

    /// `[words]` u32 for a step of `layout`, which must be one of the [shape](Self::shape)'s.
    pub fn tensor(&self, layout: &StepLayout) -> Tensor<'_> {
        assert!(layout.tokens <= self.shape.sequences && *layout == self.shape.layout(layout.tokens), "{layout:?}");
        // SAFETY: the segment is backed for the largest layout and lives as long as the borrow; only the step lane touches
        // it, one pass after the other.
        unsafe { Tensor::persistent(self.segment.address(), [layout.words()], DType::U32) }
    }

    /// Keeps what pays for the graphs, for as long as this lives: longer than any lane that works in this memory, and so
    /// than its graphs. A second lease is dropped.
    pub fn pay(&self, lease: Lease) {
        drop(self.paid.set(lease));
    }

    /// How many sizes are captured.
    pub fn captured(&self) -> &Arc<Captured> {
        &self.captured
    }

    /// What is leased for the graphs, once they are captured.
    pub fn paid(&self) -> Bytes {
        self.paid.get().map_or(Bytes::ZERO, Lease::bytes)
    }
}

/// Rows of picture embeddings.
pub struct VisionCache {
    segment: Segment,
    rows: usize,
    hidden: usize,
    dtype: DType,
}

impl VisionCache {
    /// All of a backed segment as rows of `hidden` elements.
    pub fn over(segment: Segment, hidden: usize, dtype: DType) -> Self {
        let rows = (segment.backed().0 / dtype.bytes(hidden).0) as usize;
        VisionCache { segment, rows, hidden, dtype }
    }

    /// One embedding.
    pub fn row_bytes(&self) -> Bytes {
        self.dtype.bytes(self.hidden)
    }

    /// How many embeddings fit.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `[rows, hidden]`
    pub fn tensor(&self) -> Tensor<'_> {
        // SAFETY: the segment is backed for that many rows and lives as long as the borrow; the vision actor gives a
        // row to one picture at a time, and the step lane reads it only after the vision lane said that it is written.
        unsafe { Tensor::persistent(self.segment.address(), [self.rows, self.hidden], self.dtype) }
    }
}

/// Keys and values, one segment a layer, all paid for by one lease.
pub struct KvMemory {
    segments: Vec<Segment>,
    shape: KvShape,
    /// Backed blocks. It becomes smaller only when no step names one that goes, and larger at any time.
    blocks: AtomicUsize,
    lease: Arc<Lease>,
}

impl KvMemory {
    /// Bytes of whole pages that `blocks` blocks take over all layers.
    pub fn bytes(shape: KvShape, blocks: usize, page: Bytes) -> Bytes {
        (shape.block_bytes() * blocks as u64).round_up(page) * shape.layers as u64
    }

    /// The most blocks that `bytes` pay for.
    pub fn blocks_in(shape: KvShape, bytes: Bytes, page: Bytes) -> usize {
        let layer = Bytes(bytes.0 / shape.layers as u64).round_down(page);
        (layer.0 / shape.block_bytes().0) as usize
    }

    /// Reserves addresses for `blocks_max` blocks and backs none; `lease` pays for those that will be.
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

    /// Backs the first `blocks` blocks of every layer, which the lease must pay for. On refusal the layers that were
    /// backed stay so, and the blocks are as many as before.
    pub fn grow_to(&self, blocks: usize) -> Result<(), DeviceError> {
        for segment in &self.segments {
            segment.back_to(self.shape.block_bytes() * blocks as u64)?;
        }
        self.blocks.store(blocks, Ordering::Release);
        Ok(())
    }

    /// Unbacks all but the first `blocks` blocks of every layer. Graphs that were captured stay valid, as addresses do; a
    /// step that names a block behind them faults.
    ///
    /// # Errors
    /// What the device says; layers that were unbacked stay so.
    ///
    /// # Panics
    /// If the fence, made behind the last step, has not passed: our own bug.
    pub fn shrink_to(&self, blocks: usize, last_use: &Fence) -> Result<(), DeviceError> {
        self.blocks.fetch_min(blocks, Ordering::AcqRel);
        for segment in &self.segments {
            segment.shrink_to(self.shape.block_bytes() * blocks as u64, last_use)?;
        }
        Ok(())
    }

    /// What pays for it.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Backed blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Acquire)
    }

    /// What a token looks like.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// One view a layer, on the backed blocks.
    pub fn layers(&self) -> Vec<KvLayer> {
        self.layers_of(self.blocks())
    }

    /// One view a layer, on all blocks that addresses are reserved for, backed or not: for graphs, which keep the number as
    /// it is when they are captured and outlive growing and shrinking. The host names no block that is not backed, to a
    /// graph as to any step; one that it named all the same would fault.
    pub fn layers_reserved(&self) -> Vec<KvLayer> {
        let reserved = self.segments.iter().map(Segment::reserved).min().unwrap_or(Bytes::ZERO);
        self.layers_of((reserved.0 / self.shape.block_bytes().0) as usize)
    }

    fn layers_of(&self, blocks: usize) -> Vec<KvLayer> {
        self.segments
            .iter()
            .map(|segment| {
                // SAFETY: that many blocks are backed, or those that steps name are; the lane that calls this keeps the
                // memory alive while it computes, and only the step lane touches keys and values.
                unsafe { KvLayer::new(segment.address(), blocks, self.shape) }
            })
            .collect()
    }
}
