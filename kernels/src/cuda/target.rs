//! The properties of a GPU that a plan depends on.

use bursar_budgets::{Bytes, CudaDevice, DeviceError};
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::{
    contract::{self, HeadDim, attention_hopper},
    decode_launch::DecodeLaunch,
};
use crate::{DType, KvShape};

/// cuBLASLt's workspace for a product. Products of few rows split their sums and need it; 32 MiB is NVIDIA's
/// recommendation from Hopper on.
pub(crate) const CUDA_LINEAR_SCRATCH: Bytes = Bytes::mib(32);

/// Smallest number of features that a tile of a product covers.
pub(crate) const CUDA_FEATURES: usize = 64;

/// A GPU's generation and number of multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaTarget {
    /// Compute capability, (9, 0) for an H200.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: usize,
    /// The type of activations, weights and the cache. bf16 where the tensor cores support it (from 8.0 on), otherwise
    /// f16; f16 everywhere if requested.
    pub activation: DType,
}

impl CudaTarget {
    /// The target of `device`, with bf16 if it supports that.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn of(device: &CudaDevice) -> Result<Self, DeviceError> {
        let number = |attribute| device.attribute(attribute).map(|number| number.max(0) as u32);
        let capability = (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let processors = number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let activation = if capability >= (8, 0) { DType::BF16 } else { DType::F16 };
        Ok(CudaTarget { capability, processors, activation })
    }

    /// Partial results that attention keeps before they are merged: for each query vector a weighted sum, the largest
    /// score and the sum of weights. Decoding has two parts of eight query vectors per worker. The number of workers is
    /// what the device runs at once and does not depend on lengths, because a captured graph keeps it. A few rows over
    /// a long context are split into at most one part of a tile per multiprocessor, if there is a kernel that splits
    /// them.
    pub(crate) fn paged_scratch(&self, shape: KvShape, heads: usize, single_rows: usize, rows: usize) -> Bytes {
        let Some(head_dim) = HeadDim::of(shape.head_dim) else { return Bytes::ZERO };
        let launch = DecodeLaunch::of(single_rows, heads, shape.kv_heads, self.processors);
        let decoding = if single_rows > 0 { launch.part_numbers(head_dim) } else { 0 };
        let has_split = self.capability == (9, 0) && shape.head_dim == attention_hopper::PAGED_HEAD_DIM;
        let splits = has_split && rows > single_rows;
        let split = if splits { self.processors * attention_hopper::PAGED_PART_NUMBERS } else { 0 };
        DType::F32.bytes(decoding.max(split))
    }

    /// There are kernels for E4M3 for every generation that is served. Hopper's copies want rows of whole 16 bytes and
    /// write 8 columns at a time; others read 16 bytes at once, and the rest is the same for all.
    pub(crate) fn has_fp8(&self, [out_features, in_features]: [usize; 2], block_rows: Option<usize>) -> bool {
        let has_tall_blocks = block_rows.is_none_or(|rows| rows >= contract::fp8::BLOCK_ROWS_MIN);
        self.capability >= (7, 5) && in_features.is_multiple_of(16) && out_features.is_multiple_of(8) && has_tall_blocks
    }

    /// Hopper has kernels for experts in E4M3 too, whose every row, gated or not, its copies read and write.
    pub(crate) fn has_fp8_experts(&self, [out_features, in_features]: [usize; 2], block_rows: Option<usize>) -> bool {
        self.capability == (9, 0)
            && self.has_fp8([out_features, in_features], block_rows)
            && out_features.is_multiple_of(16)
    }

    /// Hopper has kernels for a cache in E4M3.
    pub(crate) fn has_fp8_cache(&self) -> bool {
        self.capability == (9, 0)
    }

    /// The architecture's name in tables and fingerprints.
    pub(crate) fn name(&self) -> &'static str {
        match self.capability {
            (7, _) => "cuda sm_75",
            (8, 0) => "cuda sm_80",
            (8, 6) => "cuda sm_86",
            (8, 9) => "cuda sm_89",
            (8, _) => "cuda sm_8x",
            (9, _) => "cuda sm_90",
            (10, _) => "cuda sm_100",
            (12, _) => "cuda sm_120",
            _ => "cuda",
        }
    }
}
