//! One layer's keys and values in device memory, in blocks of sixteen tokens.

use bursar_budgets::{Address, Bytes};

use crate::{DType, Tensor};

/// Tokens per block of the cache.
pub const BLOCK_TOKENS: usize = 16;

/// The shape of one token's keys and values over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Layers, each with its own segment.
    pub layers: usize,
    /// Heads of keys and values; query heads share them in groups.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Element type of the cache: that of activations, or E4M3 with scales beside the layers.
    pub dtype: DType,
}

impl KvShape {
    /// Bytes of one block in one layer: keys and values of [`BLOCK_TOKENS`] tokens.
    pub fn block_bytes(&self) -> Bytes {
        self.dtype.bytes(2 * BLOCK_TOKENS * self.kv_heads * self.head_dim)
    }

    /// Bytes of one token over all layers.
    pub fn token_bytes(&self) -> Bytes {
        self.dtype.bytes(2 * self.layers * self.kv_heads * self.head_dim)
    }
}

/// One layer of the cache: `[block, 2 (keys, values), kv_head, BLOCK_TOKENS, head_dim]`.
///
/// Keys and values of a block are adjacent and a head's sixteen vectors are contiguous, so an attention head reads a
/// block as two streams.
#[derive(Debug)]
pub struct KvLayer {
    pub(crate) address: Address,
    pub(crate) blocks: usize,
    pub(crate) shape: KvShape,
}

impl KvLayer {
    /// A layer of `blocks` blocks at `address`.
    ///
    /// # Safety
    /// For as long as the layer is computed with, `address` must start `blocks * shape.block_bytes()` bytes of backed
    /// device memory, aligned to the element, that only operations of the same lane touch.
    pub unsafe fn new(address: Address, blocks: usize, shape: KvShape) -> Self {
        assert!(shape.kv_heads > 0 && shape.head_dim > 0, "a layer has heads, and a head has elements: {shape:?}");
        KvLayer { address, blocks, shape }
    }

    /// Where the first block is.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Blocks that are backed by memory.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The shape of a token's keys and values.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Where a block is.
    pub(crate) fn piece(&self, block: u32) -> Address {
        self.address.offset(self.shape.block_bytes() * u64::from(block))
    }

    /// This layer as operations take it, with `scales` if it holds E4M3.
    pub fn scaled<'a>(&'a self, scales: Option<&'a Tensor<'a>>) -> ScaledLayer<'a> {
        ScaledLayer { layer: self, scales }
    }
}

/// Blocks in host memory: `[layer, slot]`, each as a block of a layer is.
#[derive(Debug)]
pub struct HostBlocks {
    address: *mut u8,
    pub(crate) slots: usize,
    pub(crate) shape: KvShape,
}

impl HostBlocks {
    /// So many slots at `address`.
    ///
    /// # Safety
    /// For as long as this is copied from and to, `address` must start [`bytes_of`](Self::bytes_of) bytes of host memory
    /// that only copies of the same lane touch. For a GPU it must be page-locked.
    pub unsafe fn new(address: *mut u8, slots: usize, shape: KvShape) -> Self {
        HostBlocks { address, slots, shape }
    }

    /// Bytes of so many slots, over all layers.
    pub fn bytes_of(slots: usize, shape: KvShape) -> Bytes {
        shape.block_bytes() * (shape.layers * slots) as u64
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Where the slots of a layer begin.
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
    /// So many slots for rows of `row_bytes` at `address`.
    ///
    /// # Safety
    /// As for [`HostBlocks::new`], of `slots` rows.
    pub unsafe fn new(address: *mut u8, slots: usize, row_bytes: Bytes) -> Self {
        HostRows { address, slots, row_bytes }
    }
}

/// A layer and what its numbers are multiplied by.
#[derive(Clone, Copy, Debug)]
pub struct ScaledLayer<'a> {
    /// The layer.
    pub layer: &'a KvLayer,
    /// `[2, kv_heads]` f32, above zero, for a layer of E4M3: what the keys of each head are multiplied by, then what its
    /// values are.
    pub scales: Option<&'a Tensor<'a>>,
}

/// A layer that needs no scales.
impl<'a> From<&'a KvLayer> for ScaledLayer<'a> {
    fn from(layer: &'a KvLayer) -> Self {
        layer.scaled(None)
    }
}
