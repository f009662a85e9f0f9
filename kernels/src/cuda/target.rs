//! What a plan for a GPU is made for.

use bursar_budgets::{Bytes, CudaDevice, DeviceError};
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::{DType, KvShape};

/// What cuBLASLt may use for a product. Products of few rows split their sums and need it; NVIDIA recommends this much
/// from Hopper on.
pub(crate) const CUDA_LINEAR_SCRATCH: Bytes = Bytes::mib(32);

/// Elements of a head that the attention kernels are compiled for.
pub(crate) const CUDA_HEAD_DIMS: [usize; 4] = [32, 64, 80, 128];

/// Parts that a past may be cut into when one sequence decodes alone.
const SPLITS_MAX: usize = 64;

/// The generation of a GPU, and how wide it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaTarget {
    /// Compute capability, as (9, 0) for an H200.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: usize,
    /// The type of activations, weights and the cache: bf16 where the tensor cores take it (from 8.0 on), else f16; f16
    /// everywhere if that is asked for.
    pub activation: DType,
}

impl CudaTarget {
    /// The target of a device, with bf16 where it has it.
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

    /// How many parts the pasts of `single_rows` decoding sequences are cut into, so that all multiprocessors have
    /// something to read (Flash-Decoding, Dao et al. 2023). It follows from the shape of the step alone: a captured graph
    /// keeps it whatever the lengths become.
    pub(crate) fn splits(&self, single_rows: usize, kv_heads: usize) -> usize {
        // Two for each multiprocessor: contexts are of different lengths, and the short ones finish early.
        (2 * self.processors).div_ceil((single_rows * kv_heads).max(1)).clamp(1, SPLITS_MAX)
    }

    /// For each head of each decoding sequence and each part: the weighted sum, the largest score, the sum of weights.
    pub(crate) fn paged_scratch(&self, heads: usize, shape: KvShape, single_rows: usize) -> Bytes {
        match single_rows {
            0 => Bytes::ZERO,
            rows => DType::F32.bytes(rows * heads * self.splits(rows, shape.kv_heads) * (shape.head_dim + 2)),
        }
    }

    /// The name of the architecture.
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
