//! Restart policies. ractor tells of deaths; what to do about them is decided here.

mod background_task;
mod drill;
mod news;
mod policy;

pub use background_task::{BackgroundTask, BackgroundTaskDied, Latest};
pub use drill::{Drill, Drilled};
pub use news::{end_of, runs};
pub use policy::{Decision, Intensity, Policy, RestartLog};
