//! The actors that hold leases and serve requests.
//!
//! Six modules are actors: `runtime`, `budget`, `engine`, `profile`, `vision` and `scheduler`. In
//! each of them, `message.rs` lists the messages that the actor accepts, `core.rs` makes decisions
//! without a clock, a device or ractor, and `actor.rs` is a thin shell. The actors share the other
//! modules. [`tree`] contains the supervision tree and the one table that says which actor may ask
//! which other actor.
//!
//! This crate knows messages and deaths. It must never know mathematics, files, or the name
//! of a model family.

pub mod budget;
pub mod capture;
pub mod chat;
pub mod compute;
pub mod credit;
pub mod deadline;
pub mod engine;
pub mod event;
pub mod finish_reason;
pub mod knobs;
pub mod kv;
pub mod losses;
pub mod metric;
pub mod order;
pub mod pace;
pub mod phase;
pub mod profile;
pub mod responder;
pub mod runtime;
pub mod scheduler;
pub mod sleep;
pub mod supervise;
pub mod tenant;
pub mod testing;
pub mod tree;
pub mod vision;

pub use ractor;
