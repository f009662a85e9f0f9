//! The operations a model is written in.
//!
//! A forward pass is code over a [`Scope`]: each call checks shapes, takes its output from the workspace, counts the
//! work, and hands a [`Backend`] the arithmetic. [`Plan`] does no arithmetic, so a plan is the same code run on shapes
//! alone; [`Cpu`] computes on leased host memory; [`Cuda`] launches on a GPU. A plan is made for a [`Target`], and what it
//! says a target's pass takes is what the pass then takes, to the byte.
//!
//! This crate knows shapes, element types and launches. It must never know a model's name, a request, a token's
//! meaning, an actor or a file. It takes no memory of its own: every temporary is a view on a workspace, also the
//! scratch an operation needs on a target, and nothing is copied between host and device but by [`Scope::upload`],
//! [`Scope::download`] and [`Scope::download_later`].

#![deny(missing_docs)]

mod backend;
mod cpu;
mod cuda;
mod dtype;
mod error;
mod kv_layer;
pub mod ops;
mod plan;
pub mod sampling;
mod scope;
mod shape;
mod target;
mod tensor;
mod work;

pub use backend::{AUTOTUNED_LAYERS, Backend, Graph};
pub use cpu::Cpu;
pub use cuda::{BlasSearch, Cuda, CudaKernels, CudaTarget, OpenError, ProductsBy, Tuning};
pub use dtype::{DType, Element};
pub use error::KernelError;
pub use kv_layer::{BLOCK_TOKENS, KvLayer, KvShape};
pub use plan::Plan;
pub use scope::Scope;
pub use shape::Shape;
pub use target::Target;
pub use tensor::Tensor;
pub use work::{Work, WorkCounter};
