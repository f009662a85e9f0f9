//! The actors that hold leases and serve requests.
//!
//! | folder | contents | must not name |
//! |---|---|---|
//! | `actor` | the six actors: runtime, budget, engine, profile, vision, scheduler; and the task that captures graphs | |
//! | `client` | chats: requests, their preparation, and replies | runtime |
//! | `compute` | lanes: threads that own a device's stream and run a model | an actor |
//! | `shared` | replies to messages, supervision, metrics, events, and the pure cores that several
//! actors use | an actor, a client |
//! | `knobs`, `sleep` | settings of a model; the requests that keep a model awake | |
//!
//! [`tree`] contains the supervision tree, and the only table of which actor may ask which other
//! actor.
//!
//! This crate handles messages and deaths of actors. It must never know arithmetic, files, or the
//! name of a model family.

#![warn(clippy::match_bool)]

mod actor;
mod client;
pub mod compute;
pub mod knobs;
mod shared;
pub mod sleep;
pub mod testing;

pub use actor::{budget, capture, engine, profile, runtime, scheduler, vision};
pub use client::chat;
pub use ractor;
pub use shared::{
    credit, deadline, event, finish_reason, kv, losses, metric, order, phase, responder, supervise, tenant,
    token_interval, tree,
};
