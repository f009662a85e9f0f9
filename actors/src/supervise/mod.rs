//! Restart policies. ractor reports deaths; this module decides what to do about them.

mod background_task;
mod child_events;
mod fault_injection;
mod policy;

pub use background_task::{BackgroundTask, BackgroundTaskDied, Latest};
pub use child_events::{end_of, runs};
pub use fault_injection::{FaultInjection, InjectedFault};
pub use policy::{Decision, Intensity, Policy, RestartLog};
