//! What the budget actor can be asked.

use bursar_budgets::{Bytes, Gate, GateError, Label, Lease, LeaseId, Owner, Refusal, Request, RequestId, Snapshot};

use crate::{responder::Responder, supervise::FaultInjection};

/// Messages from any holder of a [`Budget`](super::Budget). Credit: the ledger's bounded queue of waiting requests.
pub enum BudgetMessage {
    /// Asks for a lease. Answered when it is granted or refused.
    Ask {
        /// Names the question, to withdraw it.
        id: RequestId,
        /// Owner, class and bytes.
        request: Request,
        /// Whether to wait for others to give memory back, or be refused at once.
        wait: bool,
        /// The lease, or why it was refused.
        reply: Responder<Result<Lease, Refusal>>,
    },
    /// Resizes a lease. Shrinking is answered when the fence has passed.
    Resize {
        /// Names the question, to withdraw it.
        id: RequestId,
        /// The lease to resize.
        lease: LeaseId,
        /// Its new size.
        to: Bytes,
        /// As for `Ask`, if the lease grows.
        wait: bool,
        /// The change to apply to the lease, or why it was refused.
        reply: Responder<Result<bursar_budgets::Resized, Refusal>>,
    },
    /// The asker has gone.
    Withdraw(RequestId),
    /// An owner is dead. Everything it held is revoked. Answered when all of it is back.
    OwnerDied {
        /// The owner and its generation.
        owner: Owner,
        /// Answered when all memory is back.
        reply: Responder<()>,
    },
    /// Moves a model's gate.
    Gate {
        /// The model.
        model: Label,
        /// The new state of the gate.
        to: Gate,
        /// Whether the gate moved.
        reply: Responder<Result<(), GateError>>,
    },
    /// Asks how many bytes of device memory a new lease could get now.
    Available {
        /// Whether the model being sized has leased all that it took. Then anything else taken is overhead.
        is_leased: bool,
        /// The bytes available.
        reply: Responder<Bytes>,
    },
    /// Every byte, by class and owner, after a fresh look at the driver's free bytes.
    Measure(Responder<Snapshot>),
    /// Every byte, by class and owner.
    Snapshot(Responder<Snapshot>),
    /// Notes are in the mailbox.
    Notes,
    /// Polls the fences that leases wait for.
    Poll,
    /// Compares the driver's free bytes with the ledger.
    Probe,
    /// A message from itself: looks if other processes have more than the last look saw.
    QuickCheck,
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}
