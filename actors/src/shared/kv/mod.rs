//! Blocks of keys and values: which sequence holds which block, on the device or in host memory.
//! These decisions are part of the scheduler's (ADR 8), so this module has no actor.

mod block_log;
mod core;

pub(crate) use block_log::BlockReceiver;
pub use block_log::{BlockEvent, BlockLog, StoredBlock};
pub use core::{Allotment, Beginning, BlockRequest, Copies, KvCore, KvUse, SequenceId, Table};
