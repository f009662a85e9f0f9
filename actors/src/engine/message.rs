//! What may be said to the engine.

use super::{
    ElasticError, Outcome, Suggestion,
    start::{LoadFailed, Planned, StartPlan},
};
use crate::{
    budget::Order,
    capture::{CaptureError, Recaptured},
    compute::lane::LaneError,
    profile::{ProfileError, Profiled},
    responder::Responder,
    supervise::{BackgroundTaskDied, FaultInjection},
};

/// One of a model's lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichLane {
    /// Steps of the decoder.
    Step,
    /// Launches of the vision encoder.
    Vision,
}

/// From itself, from its profile, from the budget, and from the runtime.
pub enum EngineMessage {
    /// Plan, load, and start the first attempt at sizing.
    Begin,
    /// The weights are loaded.
    Loaded(Result<Result<(StartPlan, Planned), LoadFailed>, BackgroundTaskDied>),
    /// The wait before another attempt is over.
    Attempt {
        /// Of its owner.
        generation: u64,
    },
    /// An attempt has ended.
    Profiled {
        /// Of its owner. News of an attempt's death overtakes this message, which then is of no use any more: the memory
        /// in it has been taken back.
        generation: u64,
        /// What came of it.
        outcome: Result<Profiled, ProfileError>,
    },
    /// The device refused memory to a step or a launch of what serves. Nothing of the job is told; whoever was told so
    /// does nothing more.
    Refused {
        /// Whose actor was told.
        which: WhichLane,
        /// When that was started. Successors have nothing to do with it.
        generation: u64,
        /// What was said.
        error: LaneError,
    },
    /// What would make the model fit is known: the end of a start.
    Advised {
        /// The last attempt's evidence.
        error: ProfileError,
        /// What to change.
        knobs: Result<Vec<Suggestion>, BackgroundTaskDied>,
    },
    /// Decoding was captured again, on a lane that took over from one that died.
    Recaptured {
        /// Which time: another lane's death in the meantime makes another.
        task: u64,
        /// What came of it.
        outcome: Result<Result<Recaptured, CaptureError>, BackgroundTaskDied>,
    },
    /// The budget has something to say about keys and values. Credit: one a look of the watcher, and one a change of what
    /// is short.
    Ordered(Order),
    /// The keys and values have another size now, or not.
    PoolChanged(Result<Result<Outcome, ElasticError>, BackgroundTaskDied>),
    /// The wait before a restart is over.
    Restart {
        /// Which: another death in the meantime makes another.
        restart: u64,
    },
    /// Set the gauges again: from itself, for a recorder that has come since.
    Show,
    /// Die of this.
    InjectFault(FaultInjection),
    /// Let a GPU refuse launches of a lane: of those to come, `after` go well, and then `count` do not. On a device that
    /// launches nothing, nothing follows.
    FailLaunches {
        /// Which lane's.
        which: WhichLane,
        /// How many go well.
        after: usize,
        /// How many are refused.
        count: usize,
    },
    /// Let a lane refuse memory to its next job, as the driver does when it has none for itself.
    RefuseMemory(WhichLane),
    /// Let a lane's thread die of a panic.
    KillLane {
        /// Which.
        which: WhichLane,
        /// Answered when the thread has ended; not at all if there is none now.
        ended: Responder<()>,
    },
}
