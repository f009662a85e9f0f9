//! What may be said to the profile actor.

use super::{ProfileError, Profiled};
use crate::supervise::{Drill, ErrandDied};

/// From itself, apart from drills.
pub enum ProfileMessage {
    /// Run the attempt.
    Begin,
    /// The attempt has ended.
    Ended(Result<Result<Profiled, ProfileError>, ErrandDied>),
    /// Die of this.
    Drill(Drill),
}
