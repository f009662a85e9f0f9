//! The backend for NVIDIA GPUs: kernels of this project, compiled ahead of time, and cuBLASLt's
//! GEMMs. Unless they are quantized, activations, weights and the KV cache are bf16 (f16 on
//! Turing). Sums are f32.
//!
//! | part | files |
//! |---|---|
//! | lanes and their operations | `lane`, `backend`, `graph` |
//! | launches of operations | `attention`, `elementwise`, `experts`, `gemm`, `quantize`, `rotary`, `sample`, `states` |
//! | launch parameters | `arguments`, `decode_launch`, `quantized_cache`, `sample_scratch`, `tensor_map` |
//! | device code and its contract with the host | `contract`, `functions`, `kernels`, `module_images` |
//! | copies between host and device | `copy_blocks`, `download_staging`, `pipelined_fill`, `upload_staging` |
//! | links between ranks | `link`, `copy_link`, `nccl`, `rank_link`; `collectives` launches collectives through them |
//! | the device and its libraries | `error`, `search`, `stream`, `target` |

mod arguments;
mod attention;
mod backend;
mod collectives;
mod contract;
mod copy_blocks;
mod copy_link;
mod decode_launch;
mod download_staging;
mod elementwise;
mod error;
mod experts;
mod functions;
mod gemm;
mod graph;
mod kernels;
mod lane;
mod link;
mod module_images;
mod nccl;
mod pipelined_fill;
mod quantize;
mod quantized_cache;
mod rank_link;
mod rotary;
mod sample;
mod sample_scratch;
mod search;
mod states;
mod stream;
mod target;
mod tensor_map;
mod upload_staging;

pub(crate) use contract::PackedHeadDim as CudaPackedHeadDim;
pub use copy_link::CopyLink;
pub use error::OpenError;
pub(crate) use gemm::int4_slice_bytes;
pub use gemm::{GemmBackend, Tuning};
pub use kernels::CudaKernels;
pub use lane::Cuda;
pub use link::CudaLink;
pub use nccl::{Nccl, NcclLink, keep_multicast_off};
pub use rank_link::RankLink;
pub(crate) use sample_scratch::cuda_sample_scratch;
pub use search::BlasSearch;
pub use target::CudaTarget;
pub(crate) use target::{CUDA_FEATURES, CUDA_LINEAR_SCRATCH, cuda_route_scratch};
