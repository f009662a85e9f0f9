//! The scheduler: which sequences run in the next step, how many tokens of each, and which must
//! wait.

mod actor;
mod admission;
mod core;
mod draft_limit;
mod drafts;
mod late_tokens;
mod message;
mod scheduling_params;
mod sequence;
mod step;

pub use actor::{SchedulerActor, SchedulerArguments};
pub use admission::{SequenceForecast, predicted_peak};
pub use core::{Effect, Input, Limits, Preemptions, SchedulerCore};
pub use drafts::{DraftSource, Drafter, NgramSizes, PromptLookup, VerifiedDrafts};
pub use message::{Admission, Delivery, SchedulerMessage};
pub use scheduling_params::SchedulingParams;
pub use sequence::{Finish, NewSequence, Placeholder};
pub use step::{ChosenRows, PictureUse, Scored, StepPlan};
