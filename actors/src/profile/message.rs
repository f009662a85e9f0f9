//! What the profile actor can be told.

use super::{ProfileError, Profiled};
use crate::supervise::{BackgroundTaskDied, FaultInjection};

/// Messages from the actor itself, apart from injected faults.
pub enum ProfileMessage {
    /// Runs the attempt.
    Begin,
    /// The attempt has ended.
    Ended(Result<Result<Box<Profiled>, ProfileError>, BackgroundTaskDied>),
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}
