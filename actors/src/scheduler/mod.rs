//! The scheduler: which sequences run in the next step, how much of each, and when one must wait.

mod actor;
mod admission;
mod core;
mod late;
mod message;
mod sequence;
mod standing;
mod step;

pub use actor::{SchedulerActor, SchedulerArguments};
pub use admission::{SequenceForecast, predicted_peak};
pub use core::{Effect, Input, Limits, Preemptions, SchedulerCore};
pub use message::{Admission, Delivery, SchedulerMessage};
pub use sequence::{Finish, NewSequence, PicturePlace};
pub use standing::Standing;
pub use step::{ChosenRow, Scored, Shown, StepPlan};
