//! Device computation: lane threads, the executor that they run a model on, captured
//! graphs, and their memory.
//!
//! This module knows no actor and sends no message: a lane receives jobs and answers through
//! closures. All `unsafe` code of the crate is here, because leased memory becomes tensors here.

mod executor;
mod expert_loads;
pub mod graph;
pub mod lane;
pub mod memory;

pub use executor::{Executor, Loaded, Models};

/// Vision encoder batches in flight: one on the device and one queued after it, so that the device
/// never waits for the host to pack and copy pictures. The batches run in order on one lane and
/// share its workspace, so both fit a workspace that was stress-tested with one batch.
pub const LAUNCHES: usize = 2;
