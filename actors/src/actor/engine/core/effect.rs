//! Effects of the engine state machine.

use std::time::Duration;

use bursar_budgets::Bytes;

use super::{Child, Parts};
use crate::{
    compute::lane::LaneError,
    engine::{StartError, elastic::Change},
    profile::{AttemptReport, ProfileError},
    tree::Role,
};

/// Actions to carry out, in order. If the doc of an effect names an input that follows, that input
/// is processed before any other input.
pub enum Effect<P: Parts> {
    /// Plan and load the model. The outcome is reported as [`Loaded`](super::Input::Loaded),
    /// [`LoadRefused`](super::Input::LoadRefused) or [`LoadFailed`](super::Input::LoadFailed).
    Load {
        /// The attempt for which the weights are leased.
        attempt: u32,
    },
    /// Report that the recorded profile of this plan is no longer used, and forget its tuning.
    DropWarm { plan: P::Plan, reason: String },
    /// Start an attempt. Its end is reported as [`Profiled`](super::Input::Profiled).
    Size(Size<P>),
    /// Stop the actor of an attempt that has reported its outcome.
    EndProfile,
    /// Make the engine fail if the device is lost. Any other action would be useless on a lost
    /// device, and the runtime takes over.
    CheckDevice,
    /// End a failed attempt's threads and take back its memory.
    /// [`TakenBack`](super::Input::TakenBack) follows.
    TakeBack {
        attempt: u32,
        /// The reason for the failure. `TakenBack` contains it again.
        error: ProfileError,
    },
    /// Report the end of an attempt.
    Report(AttemptReport),
    /// Report that a successor of a dead actor will start.
    ReportRestart { actor: Role, reason: String },
    /// Send [`Attempt`](super::Input::Attempt) after the wait.
    AttemptAfter { attempt: u32, wait: Duration },
    /// Find the knobs that would have helped. They are reported as
    /// [`Advised`](super::Input::Advised).
    Advise(Advise<P>),
    /// End the engine: the start failed for this reason.
    Fail(StartError),
    /// End the engine: the serving actors are in a crash loop.
    GiveUp { reason: String },
    /// Accept the budget's orders to resize the KV cache from now on, within these bounds.
    AcceptResizeOrders {
        sized: SizedBy<P>,
        /// The smallest number of blocks.
        floor: usize,
        /// The model's share of blocks.
        most: usize,
        /// The largest number of blocks, including borrowed memory.
        limit: usize,
    },
    /// Freeze the model's gate. The model then gets no new lease of device memory, and only its KV
    /// cache may grow.
    Freeze,
    /// Start serving actors. [`Started`](super::Input::Started) follows.
    Start(Start<P>),
    /// Report READY to the progress sink of the start.
    ReportReady,
    /// Publish READY to waiting requests, which then continue.
    AdmitWaiting(P::Serving),
    /// Publish that the model is starting, so that requests wait.
    ShowStarting,
    /// Stop these actors, in this order, and wait for the end of each.
    Stop(Vec<Child<P>>),
    /// Wait until the lanes are idle, and analyze the refusal. [`Assessed`](super::Input::Assessed)
    /// follows.
    Assess { profiled: P::Profiled, error: LaneError },
    /// Send [`Restart`](super::Input::Restart) after the wait.
    RestartAfter { restart: u64, wait: Duration },
    /// Report that the KV cache has shrunk or grown. Both sizes are in blocks.
    ReportResize { from: usize, to: usize },
    /// Resize the KV cache. The end is reported as [`Pool`](super::Input::Pool).
    Change { sized: SizedBy<P>, change: Change },
    /// Let the scheduler, if one runs, use this many blocks.
    Enlarge { blocks: usize },
}

/// A sized model, and the attempt that owns its leases.
pub struct SizedBy<P: Parts> {
    pub profiled: P::Profiled,
    pub attempt: u32,
}

pub struct Size<P: Parts> {
    pub plan: P::Plan,
    pub needs: P::MemoryRequirements,
    pub loaded: P::Loaded,
    /// Whether the attempt relies on a recorded profile or on the record from before a sleep.
    pub is_warm: bool,
    pub attempt: u32,
    /// The number of earlier attempts that were refused memory.
    pub shrinks: u32,
    /// The number of blocks that fit according to the measurement of an earlier attempt.
    pub measured: Option<usize>,
}

/// Input for the search for knobs that would have helped.
pub struct Advise<P: Parts> {
    pub plan: P::Plan,
    /// KV cache tokens that the last attempt asked for.
    pub target_tokens: usize,
    /// Lower bound of the missing bytes.
    pub missing: Bytes,
}

pub struct Start<P: Parts> {
    /// The index of the first actor to start. Actors with a smaller index continue.
    pub first: usize,
    /// The actors that continue.
    pub kept: P::Children,
    /// The number of this start of serving actors, from 1.
    pub generation: u64,
    pub loaded: P::Loaded,
    /// Whether the size comes from an earlier start instead of a new measurement.
    pub is_warm: bool,
    /// The sized model, and the attempt that owns its leases.
    pub sized: SizedBy<P>,
    pub blocks: usize,
    /// The model's share of blocks.
    pub most: usize,
    /// The number of earlier refusals of memory.
    pub refusals: u32,
    /// Whether an injected fault refuses memory to the first step.
    pub refuses_a_step: bool,
}
