//! What the ledger decides.

use crate::{Bytes, Class, Gate, GateError, Grant, Hint, Label, LeaseId, Overloaded, Owner, RequestId, Resized};

/// What the ledger decides. Carry out effects in order: a later effect of the same step may grant the memory that an
/// earlier `Freed` returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The request is granted. Make the [`crate::Lease`] and hand it over; if nothing takes it, dropping it gives it
    /// back.
    Granted(Grant),
    /// The request is refused, perhaps after it waited.
    Refused(Refused),
    /// The request waits. The answer comes in a later step.
    Waiting {
        /// The request's number.
        request: RequestId,
        /// How many requests are served before it.
        ahead: usize,
    },
    /// A lease has a new size. Tell its handle, with [`crate::Lease::resize`].
    Resized(Resized),
    /// A dead owner's lease is taken back. Wait for a fence made after everything issued so far, unback the memory,
    /// then send `FencePassed` ([`crate::FenceWatch::revoke`]).
    Revoking {
        /// The dead owner's lease.
        lease: LeaseId,
    },
    /// A lease has ended and its bytes are free.
    Freed {
        /// The lease that ended.
        lease: LeaseId,
        /// Its size.
        bytes: Bytes,
    },
    /// All leases of a dead owner are freed, so its successor may start.
    OwnerCleared {
        /// The dead owner.
        owner: Owner,
    },
    /// Growth of foreign or overhead has broken rule 1. Nothing is granted until it holds again. `GiveUp`s follow.
    Deficit {
        /// By how much.
        short_by: Bytes,
        /// The part that remains once all orders are followed and all fences have passed: no elastic lease can cover
        /// it.
        uncovered: Bytes,
    },
    /// Rule 1 holds again.
    DeficitOver,
    /// An elastic lease must shrink. Its owner frees what it can and answers with `Resize`.
    GiveUp {
        /// The lease that must shrink.
        lease: LeaseId,
        /// Its owner.
        owner: Owner,
        /// Its class.
        class: Class,
        /// The most that it may keep.
        to: Bytes,
    },
    /// Part of the canary was given up. This is an alarm, unless its wanted size was lowered.
    CanaryGiven {
        /// How much.
        bytes: Bytes,
    },
    /// The canary is whole again.
    CanaryTaken {
        /// How much was added to it.
        bytes: Bytes,
    },
    /// A model's gate has moved.
    GateMoved {
        /// The model.
        model: Label,
        /// The gate's new state.
        to: Gate,
    },
    /// A model's gate could not move.
    GateStuck(GateError),
}

/// A refused request, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    /// The request's number.
    pub request: RequestId,
    /// Why it was refused.
    pub reason: Refusal,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Too little is available now.
    #[error("{} were requested, but only {} are available: {} short", asked.exact(), available.exact(), short_by.exact())]
    Short {
        /// How many more bytes were wanted.
        asked: Bytes,
        /// How many are available.
        available: Bytes,
        /// The difference.
        short_by: Bytes,
    },
    /// The request could not be met even with all other leases and processes gone.
    #[error(
        "{} were requested, but a lease can get at most {}: {} short",
        asked.exact(),
        attainable.exact(),
        short_by.exact()
    )]
    TooLarge {
        /// The size of the lease that was wanted.
        asked: Bytes,
        /// The largest size possible.
        attainable: Bytes,
        /// The difference.
        short_by: Bytes,
    },
    /// Requests of the same or a higher priority wait, and none is overtaken.
    #[error("{} were requested, but {ahead} requests for memory are ahead in the queue", asked.exact())]
    Behind {
        /// How many more bytes were wanted.
        asked: Bytes,
        /// How many requests are served first.
        ahead: usize,
    },
    /// The queue is full.
    #[error(transparent)]
    Overloaded(Overloaded),
    /// The model's gate does not admit this claimant.
    #[error(
        "the gate of {model} is {gate}: {owner} may hold {} of {class}, but asked for {} in all",
        seat.exact(),
        asked.exact()
    )]
    GateClosed {
        /// The model.
        model: Label,
        /// Its gate.
        gate: Gate,
        /// The owner that asked.
        owner: Owner,
        /// The class that it asked for.
        class: Class,
        /// The most that it may hold.
        seat: Bytes,
        /// How much it would have held.
        asked: Bytes,
    },
    /// The owner is dead, and this message came late.
    #[error("{owner} is dead")]
    OwnerDead {
        /// The dead owner.
        owner: Owner,
    },
    /// The owner's predecessor still holds memory.
    #[error("{owner} cannot start: its predecessors still hold {}", held.exact())]
    PredecessorHolds {
        /// The owner that asked.
        owner: Owner,
        /// How much its predecessors hold.
        held: Bytes,
    },
    /// The lease has ended, is being revoked, or is already shrinking.
    #[error("{lease} has ended or is already shrinking")]
    NotHeld {
        /// The lease's number.
        lease: LeaseId,
    },
    /// The request was for 0 bytes.
    #[error("the request is for 0 bytes; expected at least 1")]
    Nothing,
    /// The request was for class canary, which only the ledger itself holds.
    #[error("the canary cannot be leased")]
    CanaryAsked,
    /// The owner withdrew the request, or replaced it.
    #[error("the request was withdrawn")]
    Withdrawn,
}

impl Refusal {
    /// All values of [`name`](Refusal::name).
    pub const NAMES: [&'static str; 11] = [
        "short",
        "too_large",
        "behind",
        "overloaded",
        "gate_closed",
        "owner_dead",
        "predecessor_holds",
        "not_held",
        "nothing",
        "canary_asked",
        "withdrawn",
    ];

    /// The reason as one word, without the numbers.
    pub const fn name(&self) -> &'static str {
        match self {
            Refusal::Short { .. } => "short",
            Refusal::TooLarge { .. } => "too_large",
            Refusal::Behind { .. } => "behind",
            Refusal::Overloaded(_) => "overloaded",
            Refusal::GateClosed { .. } => "gate_closed",
            Refusal::OwnerDead { .. } => "owner_dead",
            Refusal::PredecessorHolds { .. } => "predecessor_holds",
            Refusal::NotHeld { .. } => "not_held",
            Refusal::Nothing => "nothing",
            Refusal::CanaryAsked => "canary_asked",
            Refusal::Withdrawn => "withdrawn",
        }
    }
}

impl Hint for Refusal {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        Some(match self {
            Refusal::Short { short_by, .. } => {
                format!("ask for {} less, wait, or free that much elsewhere", short_by.exact())
            }
            Refusal::TooLarge { short_by, .. } => {
                format!("ask for {} less, keep a smaller canary, or use a larger device", short_by.exact())
            }
            Refusal::Behind { .. } => "wait in the queue, or raise the request's priority".into(),
            Refusal::Overloaded(overloaded) => overloaded.hint(),
            Refusal::GateClosed { gate: Gate::Teardown, .. } => "wait until the model has stopped, then load it".into(),
            Refusal::GateClosed { .. } => "take the lease before the model is ready, or lease it as a tenant".into(),
            Refusal::PredecessorHolds { .. } => "start the successor after the `OwnerCleared` effect".into(),
            Refusal::CanaryAsked => "set the canary's size instead".into(),
            Refusal::OwnerDead { .. } | Refusal::NotHeld { .. } | Refusal::Nothing | Refusal::Withdrawn => return None,
        })
    }
}

impl Hint for Refused {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        self.reason.hint()
    }
}
