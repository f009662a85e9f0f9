//! What an engine's decisions have done.

use std::time::Duration;

use bursar_budgets::Bytes;

use super::{Child, Parts};
use crate::{
    compute::lane::LaneError,
    engine::{StartError, elastic::Change},
    profile::{AttemptReport, ProfileError},
    tree::Role,
};

/// What must be done, in order. Where an input is said to follow, it follows before any other.
pub enum Effect<P: Parts> {
    /// Plan and load. The outcome comes as [`Loaded`](super::Input::Loaded) and its like.
    Load {
        /// The attempt for which weights are leased.
        attempt: u32,
    },
    /// Say that the recorded profile of this plan is not relied on any more, and forget its tuning.
    DropWarm {
        /// The plan.
        plan: P::Plan,
        /// Why.
        reason: String,
    },
    /// Start an attempt. Its end comes as [`Profiled`](super::Input::Profiled).
    Size(Size<P>),
    /// Stop the actor of an attempt that has reported.
    EndProfile,
    /// Die if the device is lost. Everything else would be useless then, and the runtime takes over.
    CheckDevice,
    /// End a failed attempt's threads and take back its memory. [`TakenBack`](super::Input::TakenBack) follows.
    TakeBack {
        /// The attempt.
        attempt: u32,
        /// Why it failed, for that input.
        error: ProfileError,
    },
    /// Tell of an attempt's end.
    Report(AttemptReport),
    /// Tell that a successor of a dead actor will start.
    TellOfRestart {
        /// The dead actor's role.
        actor: Role,
        /// The reason of its death.
        reason: String,
    },
    /// Send [`Attempt`](super::Input::Attempt) after the wait.
    AttemptAfter {
        /// The attempt's number.
        attempt: u32,
        /// The wait.
        wait: Duration,
    },
    /// Find which knobs would have helped. They come as [`Advised`](super::Input::Advised).
    Advise(Advise<P>),
    /// End: the start failed, for this reason.
    Fail(StartError),
    /// End: the serving actors are in a crash loop.
    GiveUp {
        /// The reason, in words.
        reason: String,
    },
    /// Have the budget give orders about keys and values from now on, within these bounds.
    Obey {
        /// What they concern.
        sized: SizedBy<P>,
        /// The fewest blocks.
        floor: usize,
        /// The model's own share of blocks.
        most: usize,
        /// The most blocks, with those that others lend.
        limit: usize,
    },
    /// Freeze the model's gate: it claims no more memory.
    Freeze,
    /// Start serving actors. [`Started`](super::Input::Started) follows.
    Start(Start<P>),
    /// Tell the start's listener of READY.
    TellOfReady,
    /// Publish READY to waiting requests. They go on from here.
    LetIn(P::Serving),
    /// Publish that requests wait.
    ShowStarting,
    /// Stop these actors, in this order, and wait for each.
    Stop(Vec<Child<P>>),
    /// Wait until the lanes are idle, and see what the refusal says. [`Assessed`](super::Input::Assessed) follows.
    Assess {
        /// The model.
        profiled: P::Profiled,
        /// The lane's error.
        error: LaneError,
    },
    /// Send [`Restart`](super::Input::Restart) after the wait.
    RestartAfter {
        /// The number of the restart.
        restart: u64,
        /// The wait.
        wait: Duration,
    },
    /// Tell that keys and values have shrunk or grown.
    TellOfResize {
        /// Blocks before.
        from: usize,
        /// Blocks now.
        to: usize,
    },
    /// Change the size of keys and values. Its end comes as [`Pool`](super::Input::Pool).
    Change {
        /// Whose.
        sized: SizedBy<P>,
        /// The change.
        change: Change,
    },
    /// Let the scheduler, if there is one, use this many blocks.
    Enlarge {
        /// Blocks of keys and values.
        blocks: usize,
    },
}

/// A sized model, and the attempt that owns what it leases.
pub struct SizedBy<P: Parts> {
    /// The model.
    pub profiled: P::Profiled,
    /// The attempt.
    pub attempt: u32,
}

/// An attempt to start.
pub struct Size<P: Parts> {
    /// What was planned.
    pub plan: P::Plan,
    /// Its worst cases.
    pub needs: P::MemoryRequirements,
    /// What was loaded.
    pub loaded: P::Loaded,
    /// Whether it relies on the recorded profile.
    pub is_warm: bool,
    /// The attempt's number.
    pub attempt: u32,
    /// Attempts before it that were refused memory.
    pub shrinks: u32,
    /// Blocks that an earlier attempt found room for.
    pub measured: Option<usize>,
}

/// A question about what would have helped.
pub struct Advise<P: Parts> {
    /// What was planned.
    pub plan: P::Plan,
    /// Tokens of keys and values that the last attempt asked for.
    pub target_tokens: usize,
    /// The least that was missing.
    pub missing: Bytes,
}

/// Serving actors to start.
pub struct Start<P: Parts> {
    /// The first to start; those before it go on.
    pub first: usize,
    /// Those that go on.
    pub kept: P::Children,
    /// The number of this start of serving actors, from 1.
    pub generation: u64,
    /// What was loaded.
    pub loaded: P::Loaded,
    /// Whether an earlier start recorded the size.
    pub is_warm: bool,
    /// The sized model, and the attempt that owns what it leases.
    pub sized: SizedBy<P>,
    /// Blocks of keys and values.
    pub blocks: usize,
    /// The most blocks there may be.
    pub most: usize,
    /// How often memory was refused before.
    pub refusals: u32,
    /// Refuse memory to the first step on purpose.
    pub refuses_a_step: bool,
}
