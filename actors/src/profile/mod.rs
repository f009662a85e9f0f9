//! Sizing: plan the worst cases, run them for real, measure, and settle on what the device holds.

mod actor;
mod attempt;
mod choice;
mod core;
mod error;
mod forecast;
mod message;
mod needs;
mod suggestion;

pub use actor::{ProfileActor, ProfileArguments};
pub use attempt::{Attempt, Profiled};
pub use choice::{KvChoice, KvRoom};
pub use core::{ATTEMPTS, ATTEMPTS_MAX, ProfileRecord, RESERVE_MAX, SHRINK, Share, Sizing};
pub use error::ProfileError;
pub use forecast::{Forecast, Place, Question, default_canary};
pub use message::ProfileMessage;
pub use needs::{Needs, rows_on_their_way};
pub use suggestion::{Change, Suggestion, suggestions};
