//! Messages to the engine.

use super::{
    ElasticError, ResizeOutcome, Suggestion, WhichLane,
    actor::ActorParts,
    core::Input,
    start::{LoadFailed, LoadedModel},
};
use crate::{
    budget::ResizeOrder,
    capture::{CaptureError, Recaptured},
    profile::{ProfileError, Profiled},
    responder::Responder,
    supervise::{BackgroundTaskDied, FaultInjection},
};

/// Messages from the engine itself, its profile, the budget and the runtime.
pub enum EngineMessage {
    /// An input that the actor passes to the state machine unchanged.
    Input(Input<ActorParts>),
    /// The weights are loaded, or loading has failed.
    Loaded(Result<Result<LoadedModel, LoadFailed>, BackgroundTaskDied>),
    /// An attempt to size the model has ended.
    Profiled {
        /// The attempt's number. If the death of the attempt's actor is reported before this
        /// message, the message is ignored, because the attempt's memory has been taken back.
        attempt: u32,
        /// The smallest KV cache, in blocks, with which every request can still finish.
        least_blocks: usize,
        /// The sized model, or the reason why sizing failed.
        outcome: Result<Profiled, ProfileError>,
    },
    /// The knobs that would make the model fit have been found. This message ends a failed start.
    Advised(Result<Vec<Suggestion>, BackgroundTaskDied>),
    /// Graphs were captured again on a lane that replaced a dead one.
    Recaptured {
        /// The number of the task. The number is outdated if another lane has died since.
        task: u64,
        /// The sizes captured, or the reason why capturing failed.
        outcome: Result<Result<Recaptured, CaptureError>, BackgroundTaskDied>,
    },
    /// An order of the budget to resize the KV cache. The budget sends orders after probes, after
    /// changes of the bytes owed, and when it decides about lending.
    Ordered(ResizeOrder),
    /// A resize of the KV cache has ended.
    PoolChanged(Result<Result<ResizeOutcome, ElasticError>, BackgroundTaskDied>),
    /// Sets the gauges again, because a metrics recorder may have been installed since the last
    /// time. The engine sends this message to itself.
    Show,
    /// Makes the engine fail on purpose.
    InjectFault(FaultInjection),
    /// Makes a GPU refuse kernel launches of a lane: the next `after` launches succeed, and then
    /// `count` launches fail. Does nothing on a device without launches.
    FailLaunches {
        which: WhichLane,
        /// Number of launches that still succeed.
        after: usize,
        /// Number of launches that are refused.
        count: usize,
    },
    /// Makes a lane's next job fail for lack of memory, as if the driver had no memory left.
    RefuseMemory(WhichLane),
    KillLane {
        which: WhichLane,
        /// The reply is sent when the lane's thread has ended. If the lane does not exist, the
        /// responder is dropped without a reply.
        ended: Responder<()>,
    },
}
