//! What the ledger is told.

use crate::{Bytes, Gate, Label, LeaseId, Owner, Request, RequestId};

/// What the ledger is told. Its caller watches fences and the driver, and reports them here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// An owner wants a lease. Answered once, now or later, by `Granted` or `Refused`.
    Ask {
        /// The request's number. It must not be that of a request that waits.
        id: RequestId,
        /// The lease that is wanted.
        request: Request,
        /// Whether to wait for bytes. If false, a request that cannot be met now is refused.
        wait: bool,
    },
    /// A lease should change size. Answered once, now or later, by `Resized` or `Refused`.
    ///
    /// It replaces an earlier `Resize` of the same lease that still waits.
    Resize {
        /// The request's number. It must not be that of a request that waits.
        id: RequestId,
        /// The lease to resize.
        lease: LeaseId,
        /// Its new size.
        to: Bytes,
        /// Only to grow: whether to wait for bytes.
        wait: bool,
        /// Only to shrink: whether the device is past the last use of the tail and the tail is unbacked. If not,
        /// `FencePassed` must follow, and frees the bytes.
        passed: bool,
    },
    /// A lease was dropped.
    Release {
        /// The lease that was dropped.
        lease: LeaseId,
        /// Whether the device is past its last use and its memory is unbacked. If not, `FencePassed` must follow.
        passed: bool,
    },
    /// The device is past the last use of this lease, or of its tail if it shrinks, and the memory is unbacked.
    FencePassed {
        /// The lease whose fence has passed.
        lease: LeaseId,
    },
    /// An actor is dead, in this generation and all earlier ones. What it held is revoked, and its waiting requests are
    /// refused. Each lease comes back after its fence; once all have, `OwnerCleared` says so.
    OwnerDied {
        /// The dead actor.
        owner: Owner,
    },
    /// The asker no longer wants the answer. Refuses the request if it still waits.
    Withdraw {
        /// The request's number.
        id: RequestId,
    },
    /// What other processes hold now. While a gate is open (a model is being profiled), a decrease is ignored.
    Foreign(Bytes),
    /// The owner of an elastic lease says how far it can shrink. Orders to shrink respect this; the default is 0.
    /// Unknown leases are ignored.
    Floor {
        /// The elastic lease.
        lease: LeaseId,
        /// The size that it keeps.
        to: Bytes,
    },
    /// While rule 1 is broken or part of the canary is missing, repeats which leases must shrink. This reaches owners
    /// that started later, or lost an order with an actor that died.
    Remind {
        /// How much more than is owed must be given up, because a neighbour keeps taking.
        ahead: Bytes,
    },
    /// What our process uses outside leases now.
    Overhead(Bytes),
    /// How much to keep free of use.
    Canary(Bytes),
    /// Moves a model's gate, when the model becomes READY or stops.
    Gate {
        /// The model.
        model: Label,
        /// The gate's new state.
        to: Gate,
    },
}
