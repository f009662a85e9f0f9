//! News of a death, as ractor tells it.

use ractor::{ActorCell, ActorStatus, SupervisionEvent};

/// Whether an actor has not ended.
pub fn runs(cell: &ActorCell) -> bool {
    matches!(cell.get_status(), ActorStatus::Starting | ActorStatus::Running)
}

/// Whose end an event is about, and why; none if it is about something else. The state of the dead, which ractor sends
/// along, is dropped here.
pub fn end_of(event: SupervisionEvent) -> Option<(ActorCell, String)> {
    match event {
        SupervisionEvent::ActorFailed(cell, error) => Some((cell, error.to_string())),
        SupervisionEvent::ActorTerminated(cell, _, reason) => {
            Some((cell, reason.unwrap_or_else(|| "stopped".to_owned())))
        }
        _ => None,
    }
}
