//! Messages to the budget actor.

use bursar_budgets::{Bytes, Gate, GateError, Label, Lease, LeaseId, Owner, Refusal, Request, RequestId, Snapshot};

use crate::{responder::Responder, supervise::FaultInjection};

/// Messages from holders of a [`Budget`](super::Budget), from the mailbox and from the actor
/// itself. Backpressure comes from the ledger's bounded queue of waiting requests.
pub enum BudgetMessage {
    /// Asks for a lease. The reply is sent when the ledger grants or refuses the lease.
    Ask {
        id: RequestId,
        request: Request,
        /// Whether to wait until other leases return memory. Otherwise the request is refused at
        /// once if memory is short.
        wait: bool,
        reply: Responder<Result<Lease, Refusal>>,
    },
    /// Resizes a lease. Before the owner sends a request to shrink, it shrinks the segment, which
    /// waits for the fence of the segment's last use.
    Resize {
        id: RequestId,
        lease: LeaseId,
        to: Bytes,
        /// Whether a request to grow waits, as in [`BudgetMessage::Ask`].
        wait: bool,
        /// The change to apply to the lease, or the reason for the refusal.
        reply: Responder<Result<bursar_budgets::Resized, Refusal>>,
    },
    /// Withdraws a request whose sender was dropped before the answer.
    Withdraw(RequestId),
    /// Revokes everything that a dead owner and its earlier generations held. The reply is sent
    /// when all of it has been returned and no borrowed memory must be returned any more.
    OwnerDied {
        owner: Owner,
        reply: Responder<()>,
    },
    Gate {
        model: Label,
        to: Gate,
        reply: Responder<Result<(), GateError>>,
    },
    /// Asks how many bytes of device memory a new lease could get now.
    Available {
        /// `true` if the model being sized has leased all memory that it allocated. Any other
        /// memory that this process has newly allocated is then counted as overhead.
        is_leased: bool,
        reply: Responder<Bytes>,
    },
    /// Returns the bytes of each class and owner, after a new measurement of the driver's free
    /// bytes.
    Measure(Responder<Snapshot>),
    /// Returns the bytes of each class and owner, from the ledger without a new measurement.
    Snapshot(Responder<Snapshot>),
    /// Wakes the actor, because notes were posted to the mailbox.
    Notes,
    /// Polls the fences that leases wait for.
    Poll,
    /// Compares the driver's free bytes with the ledger.
    Probe,
    /// Checks whether other processes hold more memory than at the last probe. The actor sends this
    /// message to itself.
    QuickCheck,
    /// Makes the actor fail on purpose.
    InjectFault(FaultInjection),
}
