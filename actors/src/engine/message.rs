//! What may be said to the engine.

use crate::profile::{ProfileError, Profiled};

/// From itself, from its profile, and from the runtime.
pub enum EngineMessage {
    /// Plan, load, and start the first attempt at sizing.
    Begin,
    /// An attempt has ended.
    Profiled(Result<Profiled, ProfileError>),
    /// The wait before a restart is over.
    Restart {
        /// The first of the children to start again.
        first: usize,
    },
}
