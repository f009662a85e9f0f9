//! One layer's keys and values in device memory, in blocks of sixteen tokens.

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
/// attention head reads a block as two contiguous ranges.
#[derive(Clone, Debug)]
pub struct KvLayer {
    pub(crate) address: Address,
    pub(crate) blocks: usize,
    pub(crate) shape: KvShape,
}

impl KvLayer {
    /// Creates a layer of `blocks` blocks at `address`.
    ///
    /// # Safety
    /// As long as operations use the layer, `address` must be the start of
    /// `blocks * shape.block_bytes()` bytes of backed device memory, aligned to the element
    /// type, that only operations of the same lane access.
    pub unsafe fn new(address: Address, blocks: usize, shape: KvShape) -> Self {
        assert!(shape.kv_heads > 0 && shape.head_dim > 0, "a layer has heads, and a head has elements: {shape:?}");
        KvLayer { address, blocks, shape }
    }

    /// Splits each block into equal parts of `kv_heads` heads of `head_dim` elements, and returns the
    /// layer that stores its keys and values in part `index`. With `parts` parts per block, block `n`
    /// of this layer corresponds to block `n * parts` of the returned layer.
    ///
    /// # Panics
    /// If a block does not divide evenly into such parts, or if `index` is not below their number.
    pub fn sublayer(&self, kv_heads: usize, head_dim: usize, index: usize) -> Self {
        let shape = KvShape { kv_heads, head_dim, ..self.shape };
        let (bytes, whole) = (shape.block_bytes(), self.shape.block_bytes());
        let parts = (whole / bytes) as usize;
        assert!(bytes * parts as u64 == whole && index < parts, "sublayer {index} of {shape:?} in {:?}", self.shape);
        let blocks = (self.blocks * parts).saturating_sub(index);
        KvLayer { address: self.address.offset(bytes * index as u64), blocks, shape }
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
