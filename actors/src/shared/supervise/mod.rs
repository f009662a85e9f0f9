//! Restart policies. ractor reports deaths; this module decides what to do about them.

mod background_task;
mod fault_injection;
mod policy;

pub use background_task::{BackgroundTask, BackgroundTaskDied, Latest};
pub use fault_injection::{FaultInjection, InjectedFault};
pub use policy::{Decision, Intensity, Policy, RestartLog};
use ractor::{ActorCell, ActorStatus, SupervisionEvent};

pub fn runs(cell: &ActorCell) -> bool {
    matches!(cell.get_status(), ActorStatus::Starting | ActorStatus::Running)
}

/// Returns the actor that ended, and the reason. Returns `None` if the event does not report an
/// end. Drops the state of the dead actor, which ractor includes in the event.
pub fn end_of(event: SupervisionEvent) -> Option<(ActorCell, String)> {
    match event {
        SupervisionEvent::ActorFailed(cell, error) => Some((cell, error.to_string())),
        SupervisionEvent::ActorTerminated(cell, _, reason) => {
            Some((cell, reason.unwrap_or_else(|| "stopped".to_owned())))
        }
        _ => None,
    }
}
