//! What computes: lanes' threads, what they run a model on, captured graphs, and their memory.
//!
//! This module knows no actor and sends no message: a lane is asked by a job and answers through a closure. It holds
//! all `unsafe` code of this crate, where leased memory becomes tensors.

mod executor;
mod expert_loads;
pub mod graph;
pub mod lane;
pub mod memory;

pub use executor::{Executor, Loaded, Models};

/// Launches running at once: one on the device and one queued after it, so that the device never waits for the host to
/// pack and copy pictures. They run in order on one lane and share its workspace, so both fit what one was stressed
/// with.
pub const LAUNCHES: usize = 2;
