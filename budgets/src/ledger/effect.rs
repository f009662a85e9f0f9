//! What the ledger decides.

use crate::{Bytes, Class, Gate, GateError, Grant, Hint, Label, LeaseId, Overloaded, Owner, RequestId, Resized};

/// What the ledger decides, in the order in which it must be carried out: memory that `Freed` speaks of may be granted by
/// a later effect of the same step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Yes. Make the [`crate::Lease`] and hand it over; if nobody takes it, dropping it gives it back.
    Granted(Grant),
    /// No, or no longer.
    Refused(Refused),
    /// Not yet; the answer comes in a later step.
    Waiting {
        /// The question.
        request: RequestId,
        /// How many are served before it.
        ahead: usize,
    },
    /// A lease has a new size. Tell its handle ([`crate::Lease::resize`]).
    Resized(Resized),
    /// A dead owner's lease: wait for a fence behind all that the device was given, unback, then say `FencePassed`
    /// ([`crate::FenceWatch::revoke`]).
    Revoking {
        /// Which.
        lease: LeaseId,
    },
    /// A lease has ended and its bytes are free.
    Freed {
        /// Which.
        lease: LeaseId,
        /// How much.
        bytes: Bytes,
    },
    /// Nothing of a dead owner is out any more: its successor may start.
    OwnerCleared {
        /// Who.
        owner: Owner,
    },
    /// Growth from outside made rule 1 untrue: nothing is granted until it is true again. `GiveUp`s follow.
    Deficit {
        /// By how much.
        short_by: Bytes,
        /// What is left of it when all orders are followed and all fences passed: nothing elastic covers it.
        uncovered: Bytes,
    },
    /// Rule 1 is true again.
    DeficitOver,
    /// An elastic lease is ordered to shrink. Its owner frees what it can and answers with `Resize`.
    GiveUp {
        /// Which.
        lease: LeaseId,
        /// Whose.
        owner: Owner,
        /// What for.
        class: Class,
        /// To at most this.
        to: Bytes,
    },
    /// So much of the canary was given up: an alarm, unless its wanted size was lowered.
    CanaryGiven {
        /// How much.
        bytes: Bytes,
    },
    /// The canary is whole.
    CanaryTaken {
        /// How much was added.
        bytes: Bytes,
    },
    /// A model's gate has moved.
    GateMoved {
        /// Which model.
        model: Label,
        /// What its gate is now.
        to: Gate,
    },
    /// A model's gate has not moved.
    GateStuck(GateError),
}

/// A no, and to what.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    /// The question.
    pub request: RequestId,
    /// Why not.
    pub reason: Refusal,
}

/// Why a question was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is not enough now.
    #[error("{} asked, {} available, {} short", asked.exact(), available.exact(), short_by.exact())]
    Short {
        /// How much more was wanted.
        asked: Bytes,
        /// How much there is.
        available: Bytes,
        /// The difference.
        short_by: Bytes,
    },
    /// There never will be enough, whoever leaves.
    #[error("{} asked, but {} is all that a lease could ever get: {} short", asked.exact(), attainable.exact(), short_by.exact())]
    TooLarge {
        /// How large the lease should have been.
        asked: Bytes,
        /// How large it could get.
        attainable: Bytes,
        /// The difference.
        short_by: Bytes,
    },
    /// Others of the same or a higher priority wait, and nobody overtakes.
    #[error("{} asked while {ahead} others wait for memory", asked.exact())]
    Behind {
        /// How much more was wanted.
        asked: Bytes,
        /// How many are served first.
        ahead: usize,
    },
    /// The queue is full.
    #[error(transparent)]
    Overloaded(Overloaded),
    /// The model's gate does not let this claimant in.
    #[error("{model} is {gate}: {owner} may hold {} of {class} there, not {}", seat.exact(), asked.exact())]
    GateClosed {
        /// The model.
        model: Label,
        /// Its gate.
        gate: Gate,
        /// Who asked.
        owner: Owner,
        /// What for.
        class: Class,
        /// How much it may hold.
        seat: Bytes,
        /// How much it would hold.
        asked: Bytes,
    },
    /// The asker is dead: a late message.
    #[error("{owner} is dead")]
    OwnerDead {
        /// Who.
        owner: Owner,
    },
    /// The asker's predecessor still holds memory.
    #[error("{owner} cannot start: {} of an earlier generation are not back yet", held.exact())]
    PredecessorHolds {
        /// Who asked.
        owner: Owner,
        /// How much is still out.
        held: Bytes,
    },
    /// The lease has ended, is being revoked, or gives up its tail already.
    #[error("{lease} is not held any more, or shrinks already")]
    NotHeld {
        /// Which.
        lease: LeaseId,
    },
    /// Nothing was asked for.
    #[error("a lease of nothing was asked for")]
    Nothing,
    /// The canary is the ledger's own.
    #[error("the canary is nobody's to lease")]
    CanaryAsked,
    /// The asker took the question back, or replaced it.
    #[error("the request was withdrawn")]
    Withdrawn,
}

impl Refusal {
    /// What [`name`](Refusal::name) may be.
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
                format!("ask for {} less, wait for it, or free as much elsewhere", short_by.exact())
            }
            Refusal::TooLarge { short_by, .. } => {
                format!("ask for {} less, keep a smaller canary, or use a larger device", short_by.exact())
            }
            Refusal::Behind { .. } => "wait in the queue, or raise the request's priority".into(),
            Refusal::Overloaded(overloaded) => overloaded.hint(),
            Refusal::GateClosed { gate: Gate::Teardown, .. } => "wait until the model has stopped, then load it".into(),
            Refusal::GateClosed { .. } => "claim it before READY, or as a tenant".into(),
            Refusal::PredecessorHolds { .. } => "start the successor after OwnerCleared".into(),
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
