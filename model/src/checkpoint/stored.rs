//! Storage formats of a tensor's elements in a file: separate elements, or ggml's
//! blocks of quantized elements.

use super::tensors::TensorType;

/// The storage of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// Every element is stored separately.
    Plain(TensorType),
    /// Several elements form a block with common scales.
    Blocks(BlockType),
}

/// A block of quantized elements: ggml-org/ggml, `src/ggml-common.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(non_camel_case_types, reason = "the names are ggml's")]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl BlockType {
    /// Elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            BlockType::Q4_K | BlockType::Q5_K | BlockType::Q6_K => 256,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            BlockType::Q4_0 => 18,
            BlockType::Q4_1 => 20,
            BlockType::Q5_0 => 22,
            BlockType::Q5_1 => 24,
            BlockType::Q8_0 => 34,
            BlockType::Q4_K => 144,
            BlockType::Q5_K => 176,
            BlockType::Q6_K => 210,
        }
    }
}

impl Stored {
    /// Number of elements in the smallest unit of storage.
    pub const fn elements(self) -> usize {
        match self {
            Stored::Plain(_) => 1,
            Stored::Blocks(kind) => kind.elements(),
        }
    }

    /// Bytes of `count` elements, where `count` is a multiple of [`elements`](Self::elements);
    /// `None` if the number of bytes overflows.
    pub fn bytes(self, count: usize) -> Option<usize> {
        match self {
            Stored::Plain(dtype) => count.checked_mul(dtype.bytes()),
            Stored::Blocks(kind) => (count / kind.elements()).checked_mul(kind.bytes()),
        }
    }
}
