//! Blocks of keys and values: which sequence holds which, on the device or in host memory. A part of the scheduler's
//! decision (ADR 28), so no actor.

mod core;
mod host;

pub use core::{Allotment, Beginning, Copies, Demand, KvCore, KvUse, SequenceId, Table};
