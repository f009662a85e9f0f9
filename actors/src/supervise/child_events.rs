//! Deaths, as ractor reports them.

use ractor::{ActorCell, ActorStatus, SupervisionEvent};

/// Whether an actor is still running.
pub fn runs(cell: &ActorCell) -> bool {
    matches!(cell.get_status(), ActorStatus::Starting | ActorStatus::Running)
}

/// The actor that ended and why, or none if the event is not about an end. Drops the dead actor's state, which ractor
/// sends along.
pub fn end_of(event: SupervisionEvent) -> Option<(ActorCell, String)> {
    match event {
        SupervisionEvent::ActorFailed(cell, error) => Some((cell, error.to_string())),
        SupervisionEvent::ActorTerminated(cell, _, reason) => {
            Some((cell, reason.unwrap_or_else(|| "stopped".to_owned())))
        }
        _ => None,
    }
}
