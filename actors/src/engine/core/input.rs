//! What an engine's decisions hear.

use super::Parts;
use crate::{
    compute::lane::LaneError,
    engine::{StartError, Suggestion, WhichLane, elastic::PoolInput},
    profile::{AttemptState, Evidence, ProfileError},
    tree::Role,
};

/// An event for the engine.
pub enum Input<P: Parts> {
    /// The wait before this attempt is over. The first attempt, number 0, has none.
    Attempt {
        /// The attempt's number.
        attempt: u32,
    },
    /// The weights are loaded.
    Loaded {
        /// What was planned.
        plan: Planned<P>,
        /// Its worst cases.
        needs: P::MemoryRequirements,
        /// What was loaded.
        loaded: P::Loaded,
    },
    /// The weights were refused memory.
    LoadRefused {
        /// The plan, if planning succeeded.
        plan: Option<Planned<P>>,
        /// Why.
        error: ProfileError,
    },
    /// Planning or loading failed in a way that no other attempt would change.
    LoadFailed(StartError),
    /// An attempt has ended. If its death was heard of first, this is late and ignored.
    Profiled {
        /// The attempt's number.
        attempt: u32,
        /// The sized model, or why sizing failed.
        outcome: Result<Sized<P>, ProfileError>,
    },
    /// The actor of the current attempt died.
    ProfileDied {
        /// The reason of its death.
        reason: String,
    },
    /// All that the failed attempt held is back. Follows [`Effect::TakeBack`](super::Effect::TakeBack).
    TakenBack {
        /// Why the attempt failed.
        error: ProfileError,
        /// How far it got.
        passed: AttemptState,
    },
    /// The knobs that would help are known.
    Advised(Vec<Suggestion>),
    /// The serving actors have started. Follows [`Effect::Start`](super::Effect::Start).
    Started {
        /// All of them.
        children: P::Children,
        /// The model as they use it: a lane may have been replaced.
        profiled: P::Profiled,
        /// For requests.
        serving: P::Serving,
    },
    /// The device refused memory to a step or launch while serving.
    Refused {
        /// The lane of the actor that was told.
        which: WhichLane,
        /// The start of serving actors to which that actor belongs.
        generation: u64,
        /// The lane's error.
        error: LaneError,
    },
    /// The lanes are idle and the refusal is understood. Follows [`Effect::Assess`](super::Effect::Assess).
    Assessed {
        /// The refusal, as the error of an attempt.
        error: ProfileError,
        /// What was asked for, and what there was.
        evidence: Evidence,
    },
    /// An order about keys and values, or the end of a change.
    Pool(PoolInput),
    /// A serving actor died.
    ChildDied {
        /// Its role.
        actor: Role,
        /// The first of the serving actors that restart for it.
        first: usize,
        /// The reason of its death.
        reason: String,
    },
    /// The wait before a restart is over.
    Restart {
        /// The number of the restart. If another child died meanwhile, there is a newer one.
        restart: u64,
    },
}

/// What planning found.
pub struct Planned<P: Parts> {
    /// The plan.
    pub plan: P::Plan,
    /// Blocks of keys and values that should fit.
    pub blocks: usize,
    /// A recorded profile applies.
    pub is_warm: bool,
}

/// What a successful attempt found.
pub struct Sized<P: Parts> {
    /// The sized model.
    pub profiled: P::Profiled,
    /// The fewest blocks with which every request can still finish.
    pub floor: usize,
    /// Blocks that were stressed.
    pub blocks: usize,
    /// The most blocks that there may be later.
    pub limit: usize,
    /// How the attempt went.
    pub passed: AttemptState,
}
