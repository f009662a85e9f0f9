//! Restart policies. ractor reports deaths; this module decides what to do about them.

mod background_task;
mod fault_injection;
mod news;
mod policy;

pub use background_task::{BackgroundTask, BackgroundTaskDied, Latest};
pub use fault_injection::{FaultInjection, InjectedFault};
pub use news::{end_of, runs};
pub use policy::{Decision, Intensity, Policy, RestartLog};
