//! Blocks of keys and values: which sequence holds which.

mod actor;
mod core;
mod message;

pub use actor::{KvActor, KvArguments};
pub use core::{Allotment, Demand, Filled, KvCore, KvUse, SequenceId, Table};
pub use message::KvMessage;
