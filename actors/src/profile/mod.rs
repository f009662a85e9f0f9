//! Sizing: plan the worst cases, run them for real, measure, and settle on what the device holds.

mod actor;
mod attempt;
mod attempts;
mod basis;
mod core;
mod error;
mod evidence;
mod faults;
mod knobs;
mod message;
mod needs;
mod notice;
mod phase;
mod record;
mod written;

pub use actor::{ProfileActor, ProfileArguments};
pub(crate) use attempt::Refusal;
pub use attempt::{Attempt, Course, Passed, Profiled};
pub use attempts::{AttemptReport, Attempts, Outcome};
pub use basis::{Basis, BasisParts, Difference};
pub use core::{ATTEMPTS, ATTEMPTS_MAX, ProfileRecord, RESERVE_MAX, SHRINK_PER_CENT, Share, Sizing, shrunk};
pub use error::ProfileError;
pub use evidence::Evidence;
pub use faults::{FaultError, Faults};
pub(crate) use knobs::advice;
pub use message::ProfileMessage;
pub use needs::{Needs, rows_on_their_way};
pub use notice::Notice;
pub use phase::{Phase, UnknownPhase};
pub use record::{Found, RecordError, RecordPlace};
pub use written::{Peak, WrittenProfile};
