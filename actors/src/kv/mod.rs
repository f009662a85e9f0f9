//! Blocks of keys and values: which sequence holds which. A part of the scheduler's decision (ADR 28), so no actor.

mod core;

pub use core::{Allotment, Demand, KvCore, KvUse, SequenceId, Table};
