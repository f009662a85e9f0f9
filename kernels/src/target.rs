//! Targets: the machine that a plan is made for, its activation type and the scratch
//! that its kernels declare.

use bursar_budgets::Bytes;

use crate::{
    CudaTarget, DType, KvShape, QuantizationScheme, StateShape,
    cuda::{
        CUDA_FEATURES, CUDA_LINEAR_SCRATCH, CudaPackedHeadDim, cuda_route_scratch, cuda_sample_scratch,
        int4_slice_bytes,
    },
    int4,
};

/// Output features per step of a CPU GEMM: weights that are not `f32` are widened in panels of this
/// many rows. The number is fixed so that rounding does not depend on the number of threads that
/// share a GEMM. 64 is the number of rows that `gemm` keeps in registers with AVX-512. With 128,
/// threads seldom got equal parts of the work.
pub(crate) const CPU_PANEL_ROWS: usize = 64;

/// Query vectors per step of attention on the CPU. The number and the tiles' positions are
/// fixed so that rounding does not depend on the number of threads. `gemm` packs the keys
/// again for each tile of queries: with 32 queries, attention over 1,024 rows reached a sixth
/// of the machine's rate.
pub(crate) const CPU_TILE_QUERIES: usize = 128;

/// Keys per step of attention on the CPU. The number and the tiles' positions are fixed so that
/// rounding does not depend on the number of threads.
pub(crate) const CPU_TILE_KEYS: usize = 128;

/// Returns the elements of scratch that one thread needs for attention: queries, sums, keys, values
/// and scores, and for each query the largest score and the sum of the weights.
pub(crate) const fn cpu_attention_tile(head_dim: usize) -> usize {
    2 * (CPU_TILE_QUERIES + CPU_TILE_KEYS) * head_dim + CPU_TILE_QUERIES * CPU_TILE_KEYS + 2 * CPU_TILE_QUERIES
}

/// Rows of one expert that a thread multiplies at a time. The number is fixed so that rounding does
/// not depend on the number of threads.
pub(crate) const CPU_EXPERT_ROWS: usize = 64;

/// Returns the elements of scratch that one thread needs for a GEMM: a panel of widened weight rows
/// and, for an FP8 weight, one widened row of its quantized activations. An `f32` weight needs no
/// scratch.
pub(crate) const fn cpu_linear_share(out_features: usize, in_features: usize, weight: DType) -> usize {
    let panel = if CPU_PANEL_ROWS < out_features { CPU_PANEL_ROWS } else { out_features };
    match weight {
        DType::F32 => 0,
        DType::F8E4M3 => (panel + 1) * in_features,
        _ => panel * in_features,
    }
}

/// Returns the elements of scratch that one thread needs for an expert's GEMM: the expert's rows
/// gathered side by side, the results for a panel of weights, and the panel if it must be widened.
pub(crate) const fn cpu_experts_share(out_features: usize, in_features: usize, weight: DType) -> usize {
    let panel = if CPU_PANEL_ROWS < out_features { CPU_PANEL_ROWS } else { out_features };
    let widened = if matches!(weight, DType::F32) { 0 } else { panel * in_features };
    CPU_EXPERT_ROWS * (in_features + panel) + widened
}

/// Words of scratch per logit that one thread needs to choose a token from a row: a weight, a
/// candidate, a changed logit and a counter.
pub(crate) const CPU_SAMPLE_WORDS: usize = 6;

/// The machine that a pass is planned for and run on.
///
/// The planned bytes equal the measured bytes, because the plan and the pass get the size of each
/// operation's scratch from the same target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Leased host memory and `threads` CPU threads. Activations are `f32` for
    /// every type of weights.
    Cpu {
        threads: usize,
    },
    Cuda(CudaTarget),
}

impl Target {
    /// Returns the target of each of `ranks` ranks. Ranks on a CPU divide its threads.
    pub fn of_ranks(self, ranks: usize) -> Self {
        match self {
            Target::Cpu { threads } => Target::Cpu { threads: (threads / ranks).max(1) },
            gpu @ Target::Cuda(_) => gpu,
        }
    }

    /// Returns the type of activations, and of cached keys and values that are not quantized.
    pub fn activation(&self) -> DType {
        match self {
            Target::Cpu { .. } => DType::F32,
            Target::Cuda(cuda) => cuda.activation,
        }
    }

    /// Returns the type in which unquantized weights of type `found` are stored. The CPU
    /// keeps `found`. CUDA uses the activation type, because the tensor cores multiply
    /// operands of the same type.
    pub fn weight(&self, found: DType) -> DType {
        match self {
            Target::Cpu { .. } => found,
            Target::Cuda(cuda) => cuda.activation,
        }
    }

    /// Returns the rows to allocate for a table of `vocabulary` tokens that is an output
    /// projection. CUDA pads to whole tiles of its GEMMs. Without padding, an odd vocabulary makes
    /// a step of 256 rows a tenth slower.
    pub fn padded_vocabulary(&self, vocabulary: usize) -> usize {
        match self {
            Target::Cpu { .. } => vocabulary,
            Target::Cuda(_) => vocabulary.next_multiple_of(CUDA_FEATURES),
        }
    }

    /// Returns the width to allocate for a model's `features` between two GEMMs. CUDA pads to whole
    /// tiles, as the fast paths of the tensor cores require, and fills the rest with zeros.
    pub fn padded_features(&self, features: usize) -> usize {
        match self {
            Target::Cpu { .. } => features,
            Target::Cuda(_) => features.next_multiple_of(CUDA_FEATURES),
        }
    }

    /// Returns the head sizes, in elements, that attention over the KV cache supports.
    /// `None` means any size.
    pub fn paged_head_dims(&self) -> Option<&'static [usize]> {
        match self {
            Target::Cpu { .. } => None,
            Target::Cuda(cuda) => Some(cuda.paged_head_dims()),
        }
    }

    /// Returns the head sizes, in elements, that attention within packed ranges of rows supports.
    /// `None` means any size.
    pub fn packed_head_dims(&self) -> Option<&'static [usize]> {
        match self {
            Target::Cpu { .. } => None,
            Target::Cuda(_) => Some(&CudaPackedHeadDim::ELEMENTS),
        }
    }

    /// Scratch for a GEMM with a `[out_features, in_features]` weight of type `weight`. The CPU
    /// needs one panel of widened weight rows per thread (for FP8 also a row of activations), or
    /// nothing for an `f32` weight. On CUDA the scratch is cuBLASLt's workspace, followed by rows
    /// of dequantized elements if the weight consists of 4-bit integers. A GEMM with an f32 output
    /// never dequantizes the weight.
    pub fn linear_scratch(&self, [out_features, in_features]: [usize; 2], weight: DType, out: DType) -> Bytes {
        match self {
            Target::Cpu { threads } => {
                let panels = out_features.div_ceil(CPU_PANEL_ROWS).min((*threads).max(1));
                DType::F32.bytes(panels * cpu_linear_share(out_features, in_features, weight))
            }
            Target::Cuda(_) if weight == DType::U4 && out != DType::F32 => {
                CUDA_LINEAR_SCRATCH + int4_slice_bytes(out_features, in_features)
            }
            Target::Cuda(_) => CUDA_LINEAR_SCRATCH,
        }
    }

    /// Maximum number of rows for which a GEMM with an f32 output is faster with a weight of 4-bit
    /// integers than with an unquantized one. On an H200, 64 rows of logits of a 9B model take 365
    /// and 510 µs, 128 rows 645 and 541 µs (`tools/gpu/kernels.py int4`).
    pub fn int4_logit_rows_max(&self) -> usize {
        match self {
            Target::Cpu { .. } => usize::MAX,
            Target::Cuda(_) => 64,
        }
    }

    /// Returns `true` if weights in blocks of quantized elements are multiplied as they are stored.
    /// On other targets, they are widened when they are loaded.
    pub fn keeps_blocks(&self) -> bool {
        matches!(self, Target::Cpu { .. })
    }

    /// Scratch for choosing among `experts` experts for `rows` rows. CUDA counts the choices
    /// in groups of rows.
    pub fn route_scratch(&self, rows: usize, experts: usize) -> Bytes {
        match self {
            Target::Cpu { .. } => Bytes::ZERO,
            Target::Cuda(_) => cuda_route_scratch(rows, experts),
        }
    }

    /// Scratch for GEMMs with experts' weights of type `weight`, `[out_features, in_features]`
    /// each. For each thread, the CPU needs some rows of one expert, their results, and, unless the
    /// weights are `f32`, a panel of widened weight rows.
    pub fn experts_scratch(&self, out_features: usize, in_features: usize, weight: DType) -> Bytes {
        match self {
            Target::Cpu { threads } => {
                DType::F32.bytes((*threads).max(1) * cpu_experts_share(out_features, in_features, weight))
            }
            Target::Cuda(_) => Bytes::ZERO,
        }
    }

    /// Scratch for `[rows, features]` outputs of experts' gates before they are quantized. The CPU
    /// quantizes whole rows. On CUDA a tile of a GEMM covers only some columns of a row.
    pub fn gated_rows_scratch(&self, rows: usize, features: usize) -> Bytes {
        match self {
            Target::Cpu { .. } => DType::F32.bytes(rows * features),
            Target::Cuda(cuda) => cuda.activation.bytes(rows * features),
        }
    }

    /// Returns `true` if there are kernels for weights `[out_features, in_features]` that are
    /// stored in `scheme` in memory. A plan can be made in either case.
    pub fn has_quantized(&self, scheme: QuantizationScheme, shape: [usize; 2]) -> bool {
        match self {
            Target::Cpu { .. } => !scheme.is_int4() || int4::is_whole(scheme, shape),
            Target::Cuda(cuda) => cuda.has_quantized(scheme, shape),
        }
    }

    /// Returns `true` if there are kernels for experts' weights, `[out_features, in_features]`
    /// each, that are stored in `scheme` in memory.
    pub fn has_quantized_experts(&self, scheme: QuantizationScheme, shape: [usize; 2]) -> bool {
        match self {
            Target::Cpu { .. } => !scheme.is_int4(),
            Target::Cuda(cuda) => cuda.has_quantized_experts(scheme, shape),
        }
    }

    /// Returns `true` if the target has instructions that multiply numbers of type
    /// [`Quantization::ELEMENTS`](crate::Quantization::ELEMENTS). Other targets widen the numbers
    /// first.
    pub fn has_quantized_mma(&self) -> bool {
        match self {
            Target::Cpu { .. } => false,
            Target::Cuda(cuda) => cuda.capability >= (8, 9),
        }
    }

    /// Returns `true` if there are kernels for quantized keys and values. A plan can be
    /// made in either case.
    pub fn has_quantized_cache(&self) -> bool {
        match self {
            Target::Cpu { .. } => true,
            Target::Cuda(cuda) => cuda.has_quantized_cache(),
        }
    }

    /// Scratch for attention within packed ranges of rows, with heads of `head_dim` elements. The
    /// CPU needs one tile of queries, keys and scores per thread.
    pub fn packed_scratch(&self, head_dim: usize) -> Bytes {
        match self {
            Target::Cpu { threads } => DType::F32.bytes((*threads).max(1) * cpu_attention_tile(head_dim)),
            Target::Cuda(_) => Bytes::ZERO,
        }
    }

    /// Scratch for attention of `rows` rows of `heads` query heads over blocks of `shape`, where
    /// `single_rows` sequences have one row each. The CPU needs the same as for packed ranges. CUDA
    /// needs space for the partial results of long contexts before they are merged.
    pub fn paged_scratch(&self, shape: KvShape, heads: usize, single_rows: usize, rows: usize) -> Bytes {
        match self {
            Target::Cpu { .. } => self.packed_scratch(shape.head_dim),
            Target::Cuda(cuda) => cuda.paged_scratch(shape, heads, single_rows, rows),
        }
    }

    /// Scratch for the gated delta rule over `rows` rows, of which some belong to sequences that
    /// are not [short](crate::calls::StateSequences::short_sequences). Only some CUDA targets need
    /// scratch.
    pub fn delta_scratch(&self, shape: StateShape, rows: usize) -> Bytes {
        match self {
            Target::Cpu { .. } => Bytes::ZERO,
            Target::Cuda(cuda) => cuda.delta_scratch(shape, rows),
        }
    }

    /// Scratch for sampling from `rows` rows of `vocabulary` logits for `sequences` sequences. The
    /// CPU needs space for one row per thread. CUDA needs space for the changed logits of some rows
    /// at a time, for statistics of parts of these rows, and for the previous step's choices.
    pub fn sample_scratch(&self, rows: usize, sequences: usize, vocabulary: usize) -> Bytes {
        match self {
            Target::Cpu { threads } => DType::F32.bytes(CPU_SAMPLE_WORDS * vocabulary * rows.min((*threads).max(1))),
            Target::Cuda(_) => cuda_sample_scratch(rows, sequences, vocabulary),
        }
    }

    /// Returns `true` if passes can be captured as graphs, so that memory should
    /// be reserved for graphs.
    pub fn has_graphs(&self) -> bool {
        matches!(self, Target::Cuda(_))
    }

    /// Returns `true` if collectives need dedicated memory. On a host, ranks
    /// read each other's workspaces.
    pub fn has_exchange_memory(&self) -> bool {
        matches!(self, Target::Cuda(_))
    }

    /// Returns a text that changes when the kernels change, for fingerprints. On CUDA the
    /// text contains the hashes of all device code and the compiler's options. On the CPU it
    /// is this crate's version.
    pub fn code(&self) -> &'static str {
        match self {
            Target::Cpu { .. } => concat!("bursar-kernels ", env!("CARGO_PKG_VERSION")),
            Target::Cuda(_) => include_str!("../cuda/compiled/manifest.json"),
        }
    }

    /// Returns a short name for tables and fingerprints.
    pub fn name(&self) -> &'static str {
        match self {
            Target::Cpu { .. } => "cpu",
            Target::Cuda(cuda) => cuda.name(),
        }
    }
}
