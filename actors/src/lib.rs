//! The actors that hold leases and serve requests.
//!
//! Each actor is a folder: `message.rs` says what may be asked of it, `core.rs` decides without clock, device or ractor,
//! `actor.rs` is a thin shell. [`tree`] holds the supervision tree and the one table of who may ask whom.
//!
//! This crate knows messages and deaths. It must never know mathematics or files, and no name of a model family.

#![deny(missing_docs)]

pub mod budget;
pub mod capture;
pub mod chat;
pub mod compute;
pub mod credit;
pub mod engine;
pub mod event;
pub mod finish_reason;
pub mod knobs;
pub mod kv;
pub mod losses;
pub mod metric;
pub mod phase;
pub mod profile;
pub mod responder;
pub mod runtime;
pub mod scheduler;
pub mod supervise;
pub mod tree;
pub mod vision;

pub use ractor;
