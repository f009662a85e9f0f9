//! Sizing: plan the worst cases, run them for real, measure, and settle on what the device holds.

mod actor;
mod attempt;
mod core;
mod error;
mod knobs;
mod message;
mod needs;

pub use actor::{ProfileActor, ProfileArguments};
pub use attempt::{Attempt, Profiled};
pub use core::{ATTEMPTS, ATTEMPTS_MAX, ProfileRecord, RESERVE_MAX, SHRINK, Share, Sizing};
pub use error::ProfileError;
pub use message::ProfileMessage;
pub use needs::{Needs, rows_on_their_way};
