//! Inputs of the engine state machine.

use super::Parts;
use crate::{
    compute::lane::LaneError,
    engine::{StartError, Suggestion, elastic::PoolInput},
    profile::{AttemptState, Evidence, ProfileError},
    tree::Role,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichLane {
    Step,
    Vision,
}

pub enum Input<P: Parts> {
    /// The delay that precedes this attempt is over. Attempt 0, the first, has no wait.
    Attempt {
        attempt: u32,
    },
    Loaded {
        plan: Planned<P>,
        needs: P::MemoryRequirements,
        loaded: P::Loaded,
    },
    /// The device or the budget refused memory for the weights.
    LoadRefused {
        /// The plan, if planning succeeded.
        plan: Option<Planned<P>>,
        error: ProfileError,
    },
    /// Planning or loading failed with an error that a further attempt would not avoid.
    LoadFailed(StartError),
    /// An attempt has ended. If the death of its actor was reported first, this input is ignored.
    Profiled {
        attempt: u32,
        /// The sized model, or the reason why sizing failed.
        outcome: Result<Sized<P>, ProfileError>,
    },
    ProfileDied {
        reason: String,
    },
    /// All memory of the failed attempt has been taken back. This input follows
    /// [`Effect::TakeBack`](super::Effect::TakeBack).
    TakenBack {
        error: ProfileError,
        /// The progress of the attempt.
        passed: AttemptState,
    },
    /// The knobs that would help have been found.
    Advised(Vec<Suggestion>),
    /// The serving actors have started. This input follows [`Effect::Start`](super::Effect::Start).
    Started {
        children: P::Children,
        /// The sized model that the actors use. Its lanes differ from before if a lane was
        /// replaced.
        profiled: P::Profiled,
        serving: P::Serving,
    },
    /// The device refused memory to a step, encoder batch or copy while serving. The actor that
    /// received the lane's error reports nothing about that job and does no more work.
    Refused {
        /// The lane of the actor that received the error.
        which: WhichLane,
        /// The generation of that actor. The input is ignored if the actor has been replaced.
        generation: u64,
        error: LaneError,
    },
    /// The lanes are idle and the refusal has been analyzed. This input follows
    /// [`Effect::Assess`](super::Effect::Assess).
    Assessed {
        /// The refusal, as the error of an attempt.
        error: ProfileError,
        /// The bytes requested, and the bytes that were available.
        evidence: Evidence,
    },
    /// An order about the KV cache, or the end of a resize.
    Pool(PoolInput),
    ChildDied {
        actor: Role,
        /// The first serving actor that restarts because of this death. All later actors restart
        /// too.
        first: usize,
        reason: String,
    },
    /// The delay that precedes a restart is over.
    Restart {
        /// The number of the restart. The number is outdated if another child has died since.
        restart: u64,
    },
}

/// The result of planning.
pub struct Planned<P: Parts> {
    pub plan: P::Plan,
    /// KV cache blocks that should fit.
    pub blocks: usize,
    /// Whether a recorded profile or the record from before a sleep applies.
    pub is_warm: bool,
}

/// The result of a successful attempt.
pub struct Sized<P: Parts> {
    pub profiled: P::Profiled,
    /// The smallest number of blocks with which every request can still finish.
    pub floor: usize,
    /// The number of blocks that were stress-tested.
    pub blocks: usize,
    /// The largest number of blocks to which the cache may grow later, including borrowed memory.
    pub limit: usize,
    /// The progress of the attempt.
    pub passed: AttemptState,
}
