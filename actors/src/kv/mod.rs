//! Blocks of keys and values: which sequence holds which, on the device or in host memory. A part of the scheduler's
//! decision (ADR 8), so no actor.

mod block_log;
mod core;
mod host;

pub(crate) use block_log::BlockReceiver;
pub use block_log::{BlockEvent, BlockLog, StoredBlock};
pub use core::{Allotment, Beginning, BlockRequest, Copies, KvCore, KvUse, SequenceId, Table};
