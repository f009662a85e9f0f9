//! The actors.
//!
//! In each folder, `message.rs` lists the messages that the actor accepts, `core.rs` makes decisions
//! without a clock, a device or ractor, and `actor.rs` is a thin shell.

pub mod budget;
pub mod capture;
pub mod engine;
pub mod profile;
pub mod runtime;
pub mod scheduler;
pub mod vision;
