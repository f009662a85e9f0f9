//! NCCL, loaded at run time, for ranks whose GPUs cannot map each other's memory or have no
//! all-reduce kernels of this project.

mod collectives;
mod environment;
mod library;
mod link;
mod setup;
mod watch;

pub use environment::keep_multicast_off;
pub use library::Nccl;
pub use link::NcclLink;
pub(super) use watch::Watch;
