//! Sizing: plan the worst cases, run them, measure, and settle on what the device holds.

mod actor;
mod attempt;
mod attempts;
mod basis;
mod choice;
mod core;
mod error;
mod evidence;
mod fault_plan;
mod lanes;
mod measure;
mod message;
mod needs;
mod notice;
mod place;
mod progress;
mod record;
mod records;
mod rigour;
mod weight_store;
mod written;

pub use crate::phase::{Phase, UnknownPhase};
pub(crate) use actor::{ProfileActor, ProfileArguments, ReportAttempt};
pub(crate) use attempt::{Attempt, Course, Passed, Profiled};
pub use attempts::{AttemptReport, Attempts, Outcome};
pub use basis::{Basis, BasisParts, Difference};
pub use choice::{KvChoice, KvRoom};
pub use core::{
    ATTEMPTS, ATTEMPTS_MAX, CONTEXT_TOKENS_LEAST, ProfileRecord, RESERVE_MAX, SHRINK_PER_CENT, Share, Sizing, shrunk,
};
pub use error::ProfileError;
pub use evidence::Evidence;
pub use fault_plan::{FaultPlan, FaultPlanError};
pub(crate) use lanes::{Lanes, LanesPlace};
pub use message::ProfileMessage;
pub use needs::{Needs, rows_on_their_way};
pub use notice::Notice;
pub use place::{OVERHEAD_AT_READY, Place, default_canary};
pub use progress::{Progress, ProgressSink};
pub use record::{Found, RecordError, RecordPlace};
pub(crate) use records::Records;
pub use rigour::Rigour;
pub(crate) use weight_store::WeightStore;
pub use written::{Peak, WrittenProfile};
