//! Messages of the profile actor.

use super::{ProfileError, Profiled};
use crate::supervise::{BackgroundTaskDied, FaultInjection};

/// Messages that the actor sends to itself, apart from injected faults.
pub enum ProfileMessage {
    Begin,
    Ended(Result<Result<Box<Profiled>, ProfileError>, BackgroundTaskDied>),
    InjectFault(FaultInjection),
}
