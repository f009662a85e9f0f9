//! What may be said to the engine.

use crate::profile::{ProfileError, Profiled};

/// From itself, from its profile, and from the runtime.
pub enum EngineMessage {
    /// Plan, load, and start the first attempt at sizing.
    Begin,
    /// An attempt has ended.
    Profiled {
        /// Of its owner. News of an attempt's death overtakes this message, which then is of no use any more: the memory
        /// in it has been taken back.
        generation: u64,
        /// What came of it.
        outcome: Result<Profiled, ProfileError>,
    },
    /// The wait before a restart is over.
    Restart {
        /// Which: another death in the meantime makes another.
        restart: u64,
    },
}
