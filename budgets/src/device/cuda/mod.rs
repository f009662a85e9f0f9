//! The CUDA device.

mod carve;
mod context;
mod device;
mod driver;
mod gpu;
mod large_pages;
mod mapping;
mod meter;
mod nvml;
mod open;
mod overhead;
mod pieces;
mod pinned;
mod reservations;

pub use gpu::{CudaCounts, CudaDevice};
pub use overhead::Overhead;
pub use pinned::Pinned;
