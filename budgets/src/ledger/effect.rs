//! Pure: effects, the decisions of the ledger.

use crate::{Bytes, Class, Gate, GateError, Grant, Hint, Label, LeaseId, Overloaded, Owner, RequestId, Resized};

/// One decision of the ledger. Carry out effects in order: a later effect of the same step may
/// grant the memory that an earlier `Freed` returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The request is granted. Create the [`crate::Lease`] and hand it to the requester. If the
    /// requester is gone, drop the lease, which returns its bytes.
    Granted(Grant),
    /// The request is refused, possibly after a wait.
    Refused(Refused),
    /// The request waits. A later step answers it.
    Waiting {
        request: RequestId,
        /// The number of requests that are served before this request.
        ahead: usize,
    },
    /// A lease has a new size. Apply the size to the lease's handle with [`crate::Lease::resize`].
    Resized(Resized),
    /// A dead owner's lease is revoked. Make a fence after everything issued so far, and pass
    /// it to [`crate::FenceWatch::revoke`], which unbacks the memory once the fence has
    /// passed. Then send `FencePassed`.
    Revoking { lease: LeaseId },
    /// A lease has ended and its bytes are free.
    Freed { lease: LeaseId, bytes: Bytes },
    /// All leases of a dead owner are freed, so its successor may start.
    OwnerCleared { owner: Owner },
    /// Growth of foreign or overhead memory has broken rule 1,
    /// `granted + overhead + foreign + canary <= total`. Nothing is granted until rule 1 holds
    /// again. `GiveUp` effects follow.
    Deficit {
        short_by: Bytes,
        /// The bytes of the deficit that remain after the owners have followed all `GiveUp` effects
        /// and all fences have passed. No elastic lease can cover these bytes.
        uncovered: Bytes,
    },
    /// Rule 1 holds again: the deficit is 0.
    DeficitOver,
    /// An elastic lease must shrink. The owner frees as much of the lease as possible and answers
    /// with `Resize`.
    GiveUp {
        lease: LeaseId,
        owner: Owner,
        class: Class,
        /// The largest size that the lease may keep.
        to: Bytes,
    },
    /// The whole canary was given up, which is an alarm, or the canary shrank because its
    /// configured size was lowered.
    CanaryGiven { bytes: Bytes },
    /// The canary is whole again.
    CanaryTaken {
        /// The number of bytes that were added to the canary.
        bytes: Bytes,
    },
    /// A model's gate has moved.
    GateMoved { model: Label, to: Gate },
    /// A model's gate could not move.
    GateStuck(GateError),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    pub request: RequestId,
    pub reason: Refusal,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Too few bytes are available now.
    #[error("{} were requested, but only {} are available: {} short", asked.exact(), available.exact(), short_by.exact())]
    Short {
        /// How many more bytes were requested.
        asked: Bytes,
        available: Bytes,
        short_by: Bytes,
    },
    /// The request could not be met even if all other leases and other processes were gone.
    #[error(
        "{} were requested, but a lease can get at most {}: {} short",
        asked.exact(),
        attainable.exact(),
        short_by.exact()
    )]
    TooLarge {
        /// The requested size of the lease.
        asked: Bytes,
        /// The largest size that a lease can have.
        attainable: Bytes,
        short_by: Bytes,
    },
    /// Requests of the same or a higher priority are waiting, and this request may not overtake
    /// them.
    #[error("{} were requested, but {ahead} requests for memory are ahead in the queue", asked.exact())]
    Behind {
        /// How many more bytes were requested.
        asked: Bytes,
        /// The number of requests that are served before this request.
        ahead: usize,
    },
    /// The maximum number of requests is already waiting.
    #[error(transparent)]
    Overloaded(Overloaded),
    /// The model's gate does not admit this claimant.
    #[error(
        "the gate of {model} is {gate}: {owner} may hold {} of {class}, but asked for {} in all",
        reserved.exact(),
        asked.exact()
    )]
    GateClosed {
        model: Label,
        gate: Gate,
        owner: Owner,
        class: Class,
        /// The largest size that this claimant may hold.
        reserved: Bytes,
        /// The size that the claimant would have held.
        asked: Bytes,
    },
    /// The owner is dead, and this request arrived after its death.
    #[error("{owner} is dead")]
    OwnerDead { owner: Owner },
    /// An earlier generation of the owner still holds memory.
    #[error("{owner} cannot start: its predecessors still hold {}", held.exact())]
    PredecessorHolds {
        owner: Owner,
        /// The bytes that earlier generations of the owner still hold.
        held: Bytes,
    },
    /// The lease has ended, is being revoked, or is already shrinking.
    #[error("{lease} has ended or is already shrinking")]
    NotHeld { lease: LeaseId },
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

    /// The reason as one word, without numbers.
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
            Refusal::GateClosed { .. } => "take the lease before the model is ready, or as an external lease".into(),
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
