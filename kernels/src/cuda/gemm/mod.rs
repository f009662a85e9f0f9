//! GEMMs: by cuBLASLt, or by this project's kernels for small m (up to 64 rows, or 128 rows with
//! 4-bit integers), medium m (up to 256 rows, gated) or large m, where they were measured to be
//! faster. Quantized weights have separate kernels. The FP8 kernels for Hopper differ from the FP8
//! kernels for other GPU generations.
//!
//! | part | files |
//! |---|---|
//! | description of a GEMM | `problem`, `operands` |
//! | choice of a kernel | `table`, `plan`, `tiles`, `scale_scratch`, `int4_slices`, all pure; `planning` |
//! | autotuning and its results | `algorithm`, `tuned`, `tuning`, `recorded`, `autotune`, `compare` |
//! | launches | `linear`, `launch`, `small_m`, `medium_m`, `large_m`, `tiled`, `int4`, `int4_dequantized`, `transposed_scales`, `blas` |

mod algorithm;
mod autotune;
mod blas;
mod compare;
mod counters;
mod int4;
mod int4_dequantized;
mod int4_slices;
mod lane;
mod large_m;
mod launch;
mod linear;
mod medium_m;
mod operands;
mod plan;
mod planning;
mod problem;
mod recorded;
mod scale_arguments;
mod scale_scratch;
mod small_m;
mod table;
mod tiled;
mod tiles;
mod transposed_scales;
mod tuned;
mod tuning;

pub(super) use autotune::measure;
pub(super) use blas::Blas;
pub(super) use counters::CounterSets;
pub(crate) use int4_slices::slice_bytes as int4_slice_bytes;
pub(super) use lane::GemmLane;
pub(super) use linear::{gated_linear, linear};
pub(super) use operands::Operands;
pub use plan::GemmBackend;
pub(super) use tuned::{Agreement, Tuned};
pub use tuning::Tuning;
