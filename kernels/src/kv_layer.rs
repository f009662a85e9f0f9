//! One layer's keys and values in device memory, in blocks of sixteen tokens, and their
//! copies in host memory.

use bursar_budgets::{Address, Bytes};

use crate::{DType, Tensor};

/// Tokens per block of the cache.
pub const BLOCK_TOKENS: usize = 16;

/// The shape of one token's keys and values over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Layers, each with a separate segment.
    pub layers: usize,
    /// Heads of keys and values. Query heads share them in groups.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Element type of the cache: the type of activations, or a quantized type with separate
    /// scales.
    pub dtype: DType,
}

impl KvShape {
    /// Returns the bytes of one block in one layer: keys and values of [`BLOCK_TOKENS`] tokens.
    pub fn block_bytes(&self) -> Bytes {
        self.dtype.bytes(2 * BLOCK_TOKENS * self.kv_heads * self.head_dim)
    }

    /// Returns the bytes of one token over all layers.
    pub fn token_bytes(&self) -> Bytes {
        self.dtype.bytes(2 * self.layers * self.kv_heads * self.head_dim)
    }
}

/// One layer of the cache: `[block, 2 (keys, values), kv_head, BLOCK_TOKENS, head_dim]`.
///
/// Keys and values of a block are adjacent, and a head's sixteen vectors are contiguous, so an
/// attention head reads a block as two streams.
#[derive(Debug)]
pub struct KvLayer {
    pub(crate) address: Address,
    pub(crate) blocks: usize,
    pub(crate) shape: KvShape,
}

impl KvLayer {
    /// Creates a layer of `blocks` blocks at `address`.
    ///
    /// # Safety
    /// As long as operations use the layer, `address` must start
    /// `blocks * shape.block_bytes()` bytes of backed device memory, aligned to the element
    /// type, that only operations of the same lane access.
    pub unsafe fn new(address: Address, blocks: usize, shape: KvShape) -> Self {
        assert!(shape.kv_heads > 0 && shape.head_dim > 0, "a layer has heads, and a head has elements: {shape:?}");
        KvLayer { address, blocks, shape }
    }

    /// Returns the address of the first block.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Returns the number of blocks that are backed by memory.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn shape(&self) -> KvShape {
        self.shape
    }

    pub(crate) fn piece(&self, block: u32) -> Address {
        self.address.offset(self.shape.block_bytes() * u64::from(block))
    }

    /// Returns this layer as an argument for operations, with `scales` if the elements are
    /// quantized.
    pub fn scaled<'a>(&'a self, scales: Option<&'a Tensor<'a>>) -> ScaledLayer<'a> {
        ScaledLayer { layer: self, scales }
    }
}

/// Blocks in host memory: `[layer, slot]`. Each slot has the layout of one block of a layer.
#[derive(Debug)]
pub struct HostBlocks {
    address: *mut u8,
    pub(crate) slots: usize,
    pub(crate) shape: KvShape,
}

impl HostBlocks {
    /// Creates `slots` slots at `address`.
    ///
    /// # Safety
    /// As long as copies use these blocks, `address` must start
    /// [`bytes_of`](Self::bytes_of) bytes of host memory that only copies of the same lane
    /// access. For a GPU the memory must be page-locked.
    pub unsafe fn new(address: *mut u8, slots: usize, shape: KvShape) -> Self {
        HostBlocks { address, slots, shape }
    }

    /// Returns the bytes of `slots` slots over all layers.
    pub fn bytes_of(slots: usize, shape: KvShape) -> Bytes {
        shape.block_bytes() * (shape.layers * slots) as u64
    }

    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the address of the first slot of a layer.
    pub(crate) fn layer(&self, layer: usize) -> *mut u8 {
        self.address.wrapping_add(self.shape.block_bytes().as_usize() * layer * self.slots)
    }
}

/// Rows of pictures in host memory, one after another.
#[derive(Debug)]
pub struct HostRows {
    pub(crate) address: *mut u8,
    pub(crate) slots: usize,
    pub(crate) row_bytes: Bytes,
}

impl HostRows {
    /// Creates `slots` slots for rows of `row_bytes` at `address`.
    ///
    /// # Safety
    /// As long as copies use these rows, `address` must start `slots * row_bytes` bytes of host
    /// memory that only copies of the same lane access. For a GPU the memory must be page-locked.
    pub unsafe fn new(address: *mut u8, slots: usize, row_bytes: Bytes) -> Self {
        HostRows { address, slots, row_bytes }
    }
}

/// A layer with the scales of its keys and values.
#[derive(Clone, Copy, Debug)]
pub struct ScaledLayer<'a> {
    pub layer: &'a KvLayer,
    /// `[2, kv_heads]` f32, above zero, for a layer of quantized elements: the scales of each
    /// head's keys, then the scales of each head's values.
    pub scales: Option<&'a Tensor<'a>>,
}

impl<'a> From<&'a KvLayer> for ScaledLayer<'a> {
    fn from(layer: &'a KvLayer) -> Self {
        layer.scaled(None)
    }
}
