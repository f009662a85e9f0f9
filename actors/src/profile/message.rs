//! What may be said to the profile actor.

use super::{ProfileError, Profiled};
use crate::supervise::{BackgroundTaskDied, FaultInjection};

/// From itself, apart from drills.
pub enum ProfileMessage {
    /// Run the attempt.
    Begin,
    /// The attempt has ended.
    Ended(Result<Result<Profiled, ProfileError>, BackgroundTaskDied>),
    /// Die of this.
    InjectFault(FaultInjection),
}
