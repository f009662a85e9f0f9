//! What computes: the threads of lanes and what they run a model on, captured graphs, and the memory they work in.
//!
//! It knows no actor and sends no message: a lane is asked by a job and answers by a closure. All `unsafe` code of this crate
//! is here, where leased memory becomes tensors.

pub mod graph;
pub mod lane;
pub mod memory;
mod processor;

pub use processor::{Loaded, Processor};

/// Launches under way at once: one that the device runs, and one behind it, so that it never waits for the host to pack and
/// move the next pictures. They are in order on one lane and share its workspace, so both take what one was stressed to.
pub const LAUNCHES: usize = 2;
