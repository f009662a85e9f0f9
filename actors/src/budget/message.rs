//! What may be asked of the budget actor.

use bursar_budgets::{Bytes, Gate, GateError, Label, Lease, LeaseId, Owner, Refusal, Request, RequestId, Snapshot};

use crate::{responder::Responder, supervise::FaultInjection};

/// From anybody with a [`Budget`](super::Budget). Credit: the ledger's bounded queue of waiting requests.
pub enum BudgetMessage {
    /// A lease; answered when it is granted or refused.
    Ask {
        /// Names the question, to withdraw it.
        id: RequestId,
        /// What is wanted.
        request: Request,
        /// Wait for others to give back, or be refused at once.
        wait: bool,
        /// The lease.
        reply: Responder<Result<Lease, Refusal>>,
    },
    /// Another size for a lease; shrinking is answered when the fence has passed.
    Resize {
        /// Names the question, to withdraw it.
        id: RequestId,
        /// Which lease.
        lease: LeaseId,
        /// Its new size.
        to: Bytes,
        /// As for `Ask`, when it grows.
        wait: bool,
        /// To be applied to the lease.
        reply: Responder<Result<bursar_budgets::Resized, Refusal>>,
    },
    /// The asker has gone.
    Withdraw(RequestId),
    /// An owner is dead: everything it held is revoked; answered when all of it is home.
    OwnerDied {
        /// Who, and which generation.
        owner: Owner,
        /// All is home.
        reply: Responder<()>,
    },
    /// How far a model's startup is.
    Gate {
        /// Which model.
        model: Label,
        /// Where its gate goes.
        to: Gate,
        /// Whether it did.
        reply: Responder<Result<(), GateError>>,
    },
    /// Bytes a new lease of device memory could have now.
    Available {
        /// The model that is sized has leased all that it has taken: what came beside that is overhead.
        is_leased: bool,
        /// How many.
        reply: Responder<Bytes>,
    },
    /// Every byte, by class and owner, after a look at what the driver says is free.
    Measure(Responder<Snapshot>),
    /// Every byte, by class and owner.
    Snapshot(Responder<Snapshot>),
    /// Release notes are in the mailbox.
    Notes,
    /// Look at the fences that leases wait for.
    Poll,
    /// Compare what the driver says is free with the ledger.
    Look,
    /// Die of this.
    InjectFault(FaultInjection),
}
