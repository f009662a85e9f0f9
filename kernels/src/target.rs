//! What a plan is made for: the machine's arithmetic type and the scratch its kernels declare.

use bursar_budgets::Bytes;

use crate::{
    CudaTarget, DType, KvShape,
    cuda::{CUDA_FEATURES, CUDA_HEAD_DIMS, CUDA_LINEAR_SCRATCH, cuda_sample_scratch},
};

/// Output features one step of a CPU matrix product covers: weights that are not `f32` are widened in panels of this
/// many rows. Fixed, so that a product's rounding does not depend on how many threads share it. As many as `gemm` holds in
/// registers at a time with AVX-512; with twice as many, few threads seldom had as much to do each.
pub(crate) const CPU_PANEL_ROWS: usize = 64;

/// Query vectors, and keys, that one step of attention on the CPU covers. Fixed, like the tiles' places, for the same
/// reason. `gemm` packs the keys anew for each tile of queries: with 32, attention over 1,024 rows came to a sixth of the
/// machine's rate.
pub(crate) const CPU_TILE_QUERIES: usize = 128;
pub(crate) const CPU_TILE_KEYS: usize = 128;

/// Elements of scratch that one thread needs for attention: queries, sums, keys and values, scores, and for each query
/// the largest score and the sum of the weights.
pub(crate) const fn cpu_attention_tile(head_dim: usize) -> usize {
    2 * (CPU_TILE_QUERIES + CPU_TILE_KEYS) * head_dim + CPU_TILE_QUERIES * CPU_TILE_KEYS + 2 * CPU_TILE_QUERIES
}

/// Elements of scratch that one thread needs to choose from a row, for each of its logits: a weight, a candidate, a
/// changed logit, a counter.
pub(crate) const CPU_SAMPLE_ROOM: usize = 6;

/// The machine that a pass is planned for and run on.
///
/// A plan equals the measurement only because both ask the same target what an op needs beside its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Leased host memory and `threads` CPU threads. Activations are `f32` whatever the weights are.
    Cpu {
        /// Threads that share one operation.
        threads: usize,
    },
    /// A GPU.
    Cuda(CudaTarget),
}

impl Target {
    /// The type of activations and cached keys and values.
    pub fn activation(&self) -> DType {
        match self {
            Target::Cpu { .. } => DType::F32,
            Target::Cuda(cuda) => cuda.activation,
        }
    }

    /// What weights of type `found` are kept as: on the CPU as they are, on CUDA as what the tensor cores multiply
    /// activations with.
    pub fn weight(&self, found: DType) -> DType {
        match self {
            Target::Cpu { .. } => found,
            Target::Cuda(cuda) => cuda.activation,
        }
    }

    /// Features between two products, `features` of which are the model's: on CUDA rows of whole tiles, as the tensor
    /// cores' fast ways ask for. The rest are zeros.
    pub fn padded_features(&self, features: usize) -> usize {
        match self {
            Target::Cpu { .. } => features,
            Target::Cuda(_) => features.next_multiple_of(CUDA_FEATURES),
        }
    }

    /// Whether attention is computed with heads of so many elements.
    pub fn has_head_dim(&self, head_dim: usize) -> bool {
        match self {
            Target::Cpu { .. } => true,
            Target::Cuda(_) => CUDA_HEAD_DIMS.contains(&head_dim),
        }
    }

    /// Scratch for a product with a `[out_features, in_features]` weight of type `weight`: on the CPU, one panel of
    /// widened weight rows a thread; nothing when the weight needs no widening. On CUDA, what cuBLASLt may use.
    pub fn linear_scratch(&self, out_features: usize, in_features: usize, weight: DType) -> Bytes {
        match self {
            Target::Cpu { .. } if weight == DType::F32 => Bytes(0),
            Target::Cpu { threads } => {
                let panels = out_features.div_ceil(CPU_PANEL_ROWS).min((*threads).max(1));
                DType::F32.bytes(panels * CPU_PANEL_ROWS.min(out_features) * in_features)
            }
            Target::Cuda(_) => CUDA_LINEAR_SCRATCH,
        }
    }

    /// Scratch for attention within packed stretches, with heads of `head_dim` elements: on the CPU, one tile of queries,
    /// keys and scores a thread.
    pub fn packed_scratch(&self, head_dim: usize) -> Bytes {
        match self {
            Target::Cpu { threads } => DType::F32.bytes((*threads).max(1) * cpu_attention_tile(head_dim)),
            Target::Cuda(_) => Bytes::ZERO,
        }
    }

    /// Scratch for attention of `rows` of `heads` query heads over blocks of `shape`, where `single_rows` sequences bring one row: on the
    /// CPU as for packed stretches, on CUDA what the parts of long pasts come to before they are joined.
    pub fn paged_scratch(&self, shape: KvShape, heads: usize, single_rows: usize, rows: usize) -> Bytes {
        match self {
            Target::Cpu { .. } => self.packed_scratch(shape.head_dim),
            Target::Cuda(cuda) => cuda.paged_scratch(shape, heads, single_rows, rows),
        }
    }

    /// Scratch for choosing from `rows` rows of `vocabulary` logits for `sequences` sequences: on the CPU, room for one row
    /// a thread; on CUDA, what some rows at a time are changed to, what is known of their parts, and what was chosen before.
    pub fn sample_scratch(&self, rows: usize, sequences: usize, vocabulary: usize) -> Bytes {
        match self {
            Target::Cpu { threads } => DType::F32.bytes(CPU_SAMPLE_ROOM * vocabulary * rows.min((*threads).max(1))),
            Target::Cuda(_) => cuda_sample_scratch(rows, sequences, vocabulary),
        }
    }

    /// Whether passes can be captured as graphs, so that there is a use for what they want.
    pub fn has_graphs(&self) -> bool {
        matches!(self, Target::Cuda(_))
    }

    /// What its kernels were made from, as text that is another when they are: for fingerprints. On CUDA the hashes of all
    /// device code and its compiler's options, on the CPU this crate's version.
    pub fn code(&self) -> &'static str {
        match self {
            Target::Cpu { .. } => concat!("bursar-kernels ", env!("CARGO_PKG_VERSION")),
            Target::Cuda(_) => include_str!("../cuda/compiled/manifest.json"),
        }
    }

    /// A short name for tables and fingerprints.
    pub fn name(&self) -> &'static str {
        match self {
            Target::Cpu { .. } => "cpu",
            Target::Cuda(cuda) => cuda.name(),
        }
    }
}
