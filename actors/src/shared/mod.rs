//! Modules that the actors and the client side share. Their code names no actor.

pub(crate) mod carry_out;
pub mod credit;
pub mod deadline;
pub mod event;
pub mod finish_reason;
pub(crate) mod host_slots;
pub mod kv;
pub mod losses;
pub mod metric;
pub mod order;
pub mod phase;
pub mod responder;
pub mod supervise;
pub mod tenant;
pub mod token_interval;
pub mod tree;
