//! Assignment of KV cache blocks to sequences, on the device and in host memory. The scheduler
//! makes these decisions itself (ADR 8), so this module has no actor.

mod block_log;
mod copies;
mod core;
mod sequence_id;
mod states;

pub(crate) use block_log::BlockReceiver;
pub use block_log::{BlockEvent, BlockLog, StoredBlock};
pub use copies::Copies;
pub use core::{Allotment, Beginning, BlockRequest, KvCore, KvUse, Table};
pub use sequence_id::SequenceId;
pub use states::{SNAPSHOT_TOKENS, StateStep, StateUse};
