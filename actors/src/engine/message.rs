//! What the engine can be told.

use super::{
    ElasticError, Outcome, Suggestion,
    start::{LoadFailed, LoadedModel},
};
use crate::{
    budget::ResizeOrder,
    capture::{CaptureError, Recaptured},
    compute::lane::LaneError,
    profile::{ProfileError, Profiled},
    responder::Responder,
    supervise::{BackgroundTaskDied, FaultInjection},
};

/// One of a model's lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichLane {
    /// The lane for steps of the decoder.
    Step,
    /// The lane for launches of the vision encoder.
    Vision,
}

/// Messages from the engine itself, its profile, the budget and the runtime.
pub enum EngineMessage {
    /// The wait before an attempt is over. The first, number 0, has none.
    Attempt {
        /// The attempt's number.
        attempt: u32,
    },
    /// The weights are loaded, or loading failed.
    Loaded(Result<Result<LoadedModel, LoadFailed>, BackgroundTaskDied>),
    /// An attempt has ended.
    Profiled {
        /// The attempt's number. News of an attempt's death can overtake this message. The message is then ignored,
        /// because its memory has been taken back.
        attempt: u32,
        /// The fewest tokens of keys and values with which every request can still finish.
        least_tokens: usize,
        /// The sized model, or why sizing failed.
        outcome: Result<Profiled, ProfileError>,
    },
    /// The device refused memory to a step or launch while serving. The actor that was told reports nothing of that job
    /// and does no more work.
    Refused {
        /// The lane of the actor that was told.
        which: WhichLane,
        /// The generation in which that actor was started. Its successors are not affected.
        generation: u64,
        /// The lane's error.
        error: LaneError,
    },
    /// The knobs that would make the model fit are known. This ends a start.
    Advised(Result<Vec<Suggestion>, BackgroundTaskDied>),
    /// Graphs were captured again, on a lane that replaced a dead one.
    Recaptured {
        /// The number of the task. If another lane dies meanwhile, there is a newer task.
        task: u64,
        /// The sizes captured, or why it failed.
        outcome: Result<Result<Recaptured, CaptureError>, BackgroundTaskDied>,
    },
    /// An order of the budget about keys and values. Credit: one per look of the watcher, and one per change of what is
    /// owed.
    Ordered(ResizeOrder),
    /// A change of the cache's size has ended.
    PoolChanged(Result<Result<Outcome, ElasticError>, BackgroundTaskDied>),
    /// The wait before a restart is over.
    Restart {
        /// The number of the restart. If another child dies meanwhile, there is a newer one.
        restart: u64,
    },
    /// Sets the gauges again. The engine sends this to itself, for a recorder installed since.
    Show,
    /// Fails the engine on purpose.
    InjectFault(FaultInjection),
    /// Makes a GPU refuse launches of a lane: the next `after` succeed, and then `count` fail. Does nothing on a device
    /// without launches.
    FailLaunches {
        /// The lane whose launches fail.
        which: WhichLane,
        /// Launches that still succeed.
        after: usize,
        /// Launches that are refused.
        count: usize,
    },
    /// Makes a lane's next job fail for lack of memory, as if the driver had none.
    RefuseMemory(WhichLane),
    /// Makes a lane's thread panic.
    KillLane {
        /// The lane to kill.
        which: WhichLane,
        /// Answered when the thread has ended. Dropped without an answer if there is no such thread.
        ended: Responder<()>,
    },
}
