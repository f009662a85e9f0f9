//! The actors.
//!
//! Each folder has an `actor.rs`, the ractor actor, and a pure `core.rs`, which makes decisions
//! without a clock, a device or ractor. `message.rs` lists the messages that the actor accepts; the
//! profile's few messages are in its `actor.rs`.

pub mod budget;
pub mod capture;
pub mod engine;
pub mod profile;
pub mod runtime;
pub mod scheduler;
pub mod vision;
