//! What the ledger is told.

use crate::{Bytes, Gate, Label, LeaseId, Owner, Request, RequestId};

/// What the ledger is told. Fences and the driver are looked at outside; here stands what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// An owner wants a lease. Answered once, now or later: `Granted` or `Refused`.
    Ask {
        /// The question's number; not one that waits.
        id: RequestId,
        /// What is wanted.
        request: Request,
        /// Whether to wait for bytes that are not there; otherwise it is refused at once.
        wait: bool,
    },
    /// A lease should have another size. Answered once, now or later: `Resized` or `Refused`.
    ///
    /// A newer wish for the same lease takes the place of one that waits.
    Resize {
        /// The question's number; not one that waits.
        id: RequestId,
        /// Which lease.
        lease: LeaseId,
        /// Its new size.
        to: Bytes,
        /// To grow: whether to wait for bytes that are not there.
        wait: bool,
        /// To shrink: whether the device is past the last use of the tail and it is unbacked. If not, `FencePassed` must
        /// follow, and the bytes are free after it.
        passed: bool,
    },
    /// A lease was dropped.
    Release {
        /// Which.
        lease: LeaseId,
        /// Whether the device is past its last use and it is unbacked. If not, `FencePassed` must follow.
        passed: bool,
    },
    /// The device is past the last use of this lease, or of the tail that it gives up, and it is unbacked.
    FencePassed {
        /// Which.
        lease: LeaseId,
    },
    /// An actor is dead, in this generation and all before it. Everything it held is revoked, everything it waited for is
    /// refused. Bytes come back behind fences; when all are home, `OwnerCleared` says so, once.
    OwnerDied {
        /// Who.
        owner: Owner,
    },
    /// Nobody waits for this answer any more. A question that still waits is refused; any other is left as it is.
    Withdraw {
        /// Which question.
        id: RequestId,
    },
    /// What other processes hold now. While any gate is open (a model is being profiled) less than before is ignored.
    Foreign(Bytes),
    /// The owner of an elastic lease has said how far it can give it up; without a word it is all of it. Orders count on
    /// no more. Unknown leases are nobody's loss.
    Floor {
        /// Which lease.
        lease: LeaseId,
        /// It keeps this much, whatever is ordered.
        to: Bytes,
    },
    /// While rule 1 is untrue or the canary is owed, says who gives up what until it is whole again; what was said before
    /// too, for owners that have come since, or that have lost an order with an actor that died.
    Remind {
        /// So much more than is owed is to be given up, for a neighbour that goes on taking.
        ahead: Bytes,
    },
    /// What our process uses outside leases now.
    Overhead(Bytes),
    /// How much to keep free of use.
    Canary(Bytes),
    /// A model is READY, or stops.
    Gate {
        /// Which model.
        model: Label,
        /// What its gate becomes.
        to: Gate,
    },
}
