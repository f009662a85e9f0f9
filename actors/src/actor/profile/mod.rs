//! Sizing of a model. Worst cases are planned, run and measured, and the memory that is left
//! determines the size of the KV cache.

mod actor;
mod attempt;
mod attempts;
mod choice;
mod core;
mod error;
mod evidence;
mod fault_plan;
mod lanes;
mod measure;
mod memory_requirements;
mod memory_state;
mod notice;
mod profile_key;
mod progress;
mod record;
mod recorded_profile;
mod records;
mod stress_level;
mod weight_store;

pub use crate::phase::{Phase, UnknownPhase};
pub use actor::ProfileMessage;
pub(crate) use actor::{ProfileActor, ProfileArguments, ReportAttempt};
pub(crate) use attempt::{Attempt, AttemptProgress, AttemptState, Profiled};
pub use attempts::{AttemptReport, Attempts, Outcome};
pub use choice::{KvCapacity, KvChoice};
pub use core::{
    ATTEMPTS, ATTEMPTS_MAX, CONTEXT_TOKENS_LEAST, KvShare, ProfileRecord, RESERVE_MAX, SHRINK_PER_CENT, Sizing, shrunk,
};
pub use error::ProfileError;
pub use evidence::Evidence;
pub use fault_plan::{FaultPlan, FaultPlanError};
pub(crate) use lanes::{LaneResources, Lanes};
pub use memory_requirements::{MemoryRequirements, picture_rows_in_flight};
pub use memory_state::{MemoryState, OVERHEAD_AT_READY, default_canary};
pub use notice::Notice;
pub use profile_key::{Difference, ProfileKey, ProfileKeySources};
pub use progress::{Progress, ProgressSink};
pub use record::{RecordError, RecordLookup, RecordPath};
pub use recorded_profile::{Peak, RecordedProfile};
pub(crate) use records::Records;
pub use stress_level::StressLevel;
pub(crate) use weight_store::WeightStore;
