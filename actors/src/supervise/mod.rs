//! Restart policies. ractor tells of deaths; what to do about them is decided here.

mod background_task;
mod fault_injection;
mod news;
mod policy;

pub use background_task::{BackgroundTask, BackgroundTaskDied, Latest};
pub use fault_injection::{FaultInjection, InjectedFault};
pub use news::{end_of, runs};
pub use policy::{Decision, Intensity, Policy, RestartLog};
