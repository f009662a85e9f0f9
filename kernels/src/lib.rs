//! The operations from which models are built.
//!
//! A forward pass is code over a [`Scope`]. Each call checks shapes, takes its output from the
//! workspace (unless it writes to a tensor of the caller), counts the work and passes the operands,
//! a struct of [`calls`], to a [`Backend`]. [`Plan`] runs the same code on shapes only, [`Cpu`]
//! computes on leased host memory, and [`Cuda`] launches on a GPU. A plan is made for one
//! [`Target`], and the bytes that it reports are exactly the bytes that the target's pass takes.
//!
//! This crate knows shapes, element types and launches. It must never know a model's name, a
//! request, a token's meaning, an actor or a file. It allocates no device memory: every temporary,
//! including an operation's scratch, is a view of a workspace. Only [`Scope::upload`],
//! [`Scope::download`], [`Scope::download_later`] and their variants in [`ops::transfer`], and the
//! block copies in [`ops::copy_blocks`], copy between host and device.

#![warn(clippy::match_bool)]

mod activations;
mod backend;
mod blocks;
pub mod calls;
mod cpu;
mod cuda;
mod dtype;
mod e4m3;
mod error;
mod faulty;
mod host_link;
mod host_store;
mod input_token;
pub mod int4;
mod kv_layer;
pub mod ops;
mod plan;
mod quantization;
mod rank;
pub mod sampling;
mod scope;
mod shape;
mod state_layer;
mod target;
mod tensor;
mod weight;
mod work;

pub use activations::{ActivationFormat, ActivationScratch, Activations, QuantizedRows};
pub use backend::{AUTOTUNED_LAYERS, Backend, Graph};
pub use blocks::{BlockRows, BlockType, widen_blocks};
pub use cpu::Cpu;
pub use cuda::{
    BlasSearch, CopyLink, Cuda, CudaKernels, CudaLink, CudaTarget, GemmBackend, Nccl, NcclLink, OpenError, RankLink,
    Tuning, keep_multicast_off,
};
pub use dtype::{DType, Element};
pub use e4m3::{E4m3, e4m3_scale, largest_magnitude};
pub use error::KernelError;
pub use faulty::FaultyBackend;
pub use host_link::HostLink;
pub use host_store::HostStore;
pub use input_token::{InputToken, UnseenToken};
pub use kv_layer::{BLOCK_TOKENS, KvLayer, KvShape, ScaledLayer};
pub use plan::Plan;
pub use quantization::{Quantization, QuantizationScheme, SCALE_BLOCK, ScaledBy};
pub use rank::{Rank, RankShard};
pub use scope::Scope;
pub use shape::Shape;
pub use state_layer::{StateDtype, StateLayer, StateShape};
pub use target::Target;
pub use tensor::Tensor;
pub use weight::{Weight, WeightScales};
pub use work::{Work, WorkCounter};
