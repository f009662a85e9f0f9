//! Storage formats of a tensor's elements in a file: separate elements, ggml's blocks of quantized
//! elements, or packed integers or FP4 numbers.

pub use bursar_kernels::BlockType;
use bursar_kernels::DType;
use safetensors::Dtype;

use super::packed::PackedScheme;

/// The supported element types of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    BF16,
    F16,
    F32,
    /// FP8 (E4M3), which needs separate scales.
    F8E4M3,
}

impl TensorType {
    /// The names of all types, for messages.
    pub(super) const NAMES: &str = "BF16, F16, F32 and F8_E4M3";
    /// The type's name in safetensors files.
    pub(super) fn name(self) -> &'static str {
        match self {
            TensorType::BF16 => "BF16",
            TensorType::F16 => "F16",
            TensorType::F32 => "F32",
            TensorType::F8E4M3 => "F8_E4M3",
        }
    }

    /// The names of the quantized types, for messages.
    pub(super) const QUANTIZED: &str = "FP8 (E4M3), NVFP4, AWQ, GPTQ or compressed-tensors";

    /// The type with this name in safetensors files; `None` if it is not supported.
    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(TensorType::BF16),
            Dtype::F16 => Some(TensorType::F16),
            Dtype::F32 => Some(TensorType::F32),
            Dtype::F8_E4M3 => Some(TensorType::F8E4M3),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            TensorType::BF16 | TensorType::F16 => 2,
            TensorType::F32 => 4,
            TensorType::F8E4M3 => 1,
        }
    }
}

impl From<TensorType> for DType {
    fn from(found: TensorType) -> Self {
        match found {
            TensorType::BF16 => DType::BF16,
            TensorType::F16 => DType::F16,
            TensorType::F32 => DType::F32,
            TensorType::F8E4M3 => DType::F8E4M3,
        }
    }
}

/// The storage of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// Every element is stored separately.
    Plain(TensorType),
    /// Several elements form a block with common scales.
    Blocks(BlockType),
    /// Elements are integers or FP4 numbers in words, and their scales are in other tensors.
    Packed(PackedScheme),
}

impl Stored {
    /// Number of elements in the smallest unit of storage.
    pub const fn elements(self) -> usize {
        match self {
            Stored::Plain(_) | Stored::Packed(_) => 1,
            Stored::Blocks(kind) => kind.elements(),
        }
    }

    /// Elements in `bytes` bytes of whole units.
    pub const fn elements_in(self, bytes: usize) -> usize {
        match self {
            Stored::Plain(dtype) => bytes / dtype.bytes(),
            Stored::Blocks(kind) => bytes / kind.bytes() * kind.elements(),
            Stored::Packed(scheme) => bytes * 8 / scheme.bits,
        }
    }

    /// Bytes of `count` elements, where `count` is a multiple of [`elements`](Self::elements);
    /// `None` if the number of bytes overflows.
    pub fn bytes(self, count: usize) -> Option<usize> {
        match self {
            Stored::Plain(dtype) => count.checked_mul(dtype.bytes()),
            Stored::Blocks(kind) => (count / kind.elements()).checked_mul(kind.bytes()),
            Stored::Packed(scheme) => Some(count.checked_mul(scheme.bits)?.div_ceil(8)),
        }
    }
}
