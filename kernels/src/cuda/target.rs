//! The properties of a GPU that a memory plan depends on.

use bursar_budgets::{Bytes, CudaDevice, DeviceError};
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::{
    contract::{self, HeadDim, HopperHeadDim, attention_paged_hopper, gated_delta, quantize},
    decode_launch::DecodeLaunch,
};
use crate::{DType, KvShape, QuantizationScheme, StateShape, int4};

/// cuBLASLt's workspace for a GEMM. GEMMs of few rows split their sums over the inner dimension and
/// need the workspace; NVIDIA recommends 32 MiB for Hopper and later.
pub(crate) const CUDA_LINEAR_SCRATCH: Bytes = Bytes::mib(32);

/// Minimum number of features that a tile of a GEMM covers.
pub(crate) const CUDA_FEATURES: usize = 64;

/// Returns the bytes of scratch for choosing among `experts` experts for `rows` rows. For each
/// thread block and expert, the scratch contains how many rows of the block chose the expert.
pub(crate) fn cuda_route_scratch(rows: usize, experts: usize) -> Bytes {
    DType::U32.bytes(rows.div_ceil(contract::route::BLOCK_ROWS) * experts)
}

/// A GPU's generation, number of SMs and activation type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaTarget {
    /// Compute capability, for example (9, 0) for an H200.
    pub capability: (u32, u32),
    /// Number of SMs (streaming multiprocessors).
    pub sms: usize,
    /// The type of activations, weights and the KV cache: bf16 if the tensor cores support it
    /// (compute capability 8.0 and later), otherwise f16. Any GPU can be set to f16.
    pub activation: DType,
}

impl CudaTarget {
    /// Returns the target for `device`, with bf16 if the device supports it.
    ///
    /// # Errors
    /// The driver does not report an attribute of the device.
    pub fn of(device: &CudaDevice) -> Result<Self, DeviceError> {
        let number = |attribute| device.attribute(attribute).map(|number| number.max(0) as u32);
        let capability = (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let sms = number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let activation = if capability >= (8, 0) { DType::BF16 } else { DType::F16 };
        Ok(CudaTarget { capability, sms, activation })
    }

    /// Returns the head sizes, in elements, that attention over the KV cache supports.
    pub(crate) fn paged_head_dims(&self) -> &'static [usize] {
        // Turing has too little shared memory for a decoding warp's ring at the largest head size.
        let fitting = if self.capability < (8, 0) { HeadDim::ALL.len() - 1 } else { HeadDim::ALL.len() };
        &HeadDim::ELEMENTS[..fitting]
    }

    /// Returns the bytes of scratch for the partial results that attention stores before it merges
    /// them: for each query vector, a weighted sum, the maximum score and the sum of weights. For
    /// decoding, each worker (thread block) has two partial results, each for eight query vectors.
    /// The number of workers is an upper bound on the thread blocks that the device runs at once.
    /// It must not depend on the context lengths, because it is fixed in a captured graph. On
    /// Hopper, the kernel that splits the long context of a few rows stores at most one partial
    /// result of a tile per SM.
    pub(crate) fn paged_scratch(&self, shape: KvShape, heads: usize, single_rows: usize, rows: usize) -> Bytes {
        let Some(head_dim) = HeadDim::of(shape.head_dim) else { return Bytes::ZERO };
        let launch = DecodeLaunch::of(single_rows, heads, shape.kv_heads, self.sms);
        let decoding = if single_rows > 0 { launch.part_numbers(head_dim) } else { 0 };
        let has_split = self.capability == (9, 0) && rows > single_rows;
        let hopper = HopperHeadDim::of(shape.head_dim).filter(|_| has_split);
        let split = hopper.map_or(0, |head_dim| self.sms * attention_paged_hopper::part_numbers(head_dim));
        DType::F32.bytes(decoding.max(split))
    }

    /// Returns the bytes of scratch for the gated delta rule over `rows` rows in chunks: normalized
    /// queries and keys, two matrices over pairs of tokens of a chunk, and two gates (`Prepared` in
    /// delta_chunks.cuh). Returns zero for generations and shapes without kernels for chunks.
    pub(crate) fn delta_scratch(&self, shape: StateShape, rows: usize) -> Bytes {
        let StateShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        let has_shape = key_dim == gated_delta::KEY_DIM && value_dim.is_multiple_of(gated_delta::CHUNK_VALUES);
        if self.capability < (8, 0) || !has_shape {
            return Bytes::ZERO;
        }
        let halves = 2 * key_heads * key_dim + 2 * value_heads * gated_delta::CHUNK;
        DType::F16.bytes(rows * halves) + DType::F32.bytes(rows * 2 * value_heads)
    }

    /// Returns `true` if weights of this scheme and shape can be used. Every supported generation
    /// has kernels for FP8 weights. Hopper's TMA copies require rows that are a multiple of 16
    /// bytes and write 8 columns at a time. Kernels of other generations read 16 bytes at once and
    /// otherwise have the same requirements as Hopper's kernels. Scale blocks must have at least
    /// `BLOCK_ROWS_MIN` rows. Kernels for 4-bit integer weights require compute capability 8.0 or
    /// later, whole blocks of rows and whole groups of columns.
    pub(crate) fn has_quantized(&self, scheme: QuantizationScheme, [rows, columns]: [usize; 2]) -> bool {
        if scheme.is_int4() {
            return self.capability >= (8, 0) && int4::is_whole(scheme, [rows, columns]);
        }
        let has_tall_blocks = scheme.weights.block_rows().is_none_or(|height| height >= quantize::BLOCK_ROWS_MIN);
        self.capability >= (7, 5) && columns.is_multiple_of(16) && rows.is_multiple_of(8) && has_tall_blocks
    }

    /// Returns `true` if experts of this scheme and shape can be used. Only Hopper has kernels for
    /// quantized experts, and only for FP8. The size of an output row must be a multiple of 16
    /// bytes. A gate halves the columns of an output row, so the number of rows of the weight must
    /// be a multiple of 16.
    pub(crate) fn has_quantized_experts(&self, scheme: QuantizationScheme, shape: [usize; 2]) -> bool {
        !scheme.is_int4()
            && self.capability == (9, 0)
            && self.has_quantized(scheme, shape)
            && shape[0].is_multiple_of(16)
    }

    /// Returns `true` if the KV cache may be quantized. Only Hopper has kernels for such caches.
    pub(crate) fn has_quantized_cache(&self) -> bool {
        self.capability == (9, 0)
    }

    /// Returns the architecture's name in tables and fingerprints.
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
