//! Pure: inputs of the ledger.

use crate::{Bytes, Gate, Label, LeaseId, Owner, Request, RequestId};

/// One input of the ledger. The ledger's caller watches fences and the driver, and reports
/// changes with these inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// An owner requests a lease. The ledger answers once, in this or a later step,
    /// with `Granted` or `Refused`.
    Ask {
        /// The request's number. It must differ from the numbers of all waiting requests.
        id: RequestId,
        request: Request,
        /// Whether the request may wait. If `false`, a request that cannot be met now is refused.
        wait: bool,
    },
    /// A lease should change its size. The ledger answers once, in this or a later step,
    /// with `Resized` or `Refused`.
    ///
    /// This input replaces an earlier `Resize` of the same lease that is still waiting.
    Resize {
        /// The request's number. It must differ from the numbers of all waiting requests.
        id: RequestId,
        lease: LeaseId,
        to: Bytes,
        /// When growing: whether the request may wait. Ignored when shrinking.
        wait: bool,
        /// When shrinking: whether the device is past the last use of the tail and the tail is
        /// unbacked. If `false`, the bytes are freed by a later `FencePassed`, which must follow.
        /// Ignored when growing.
        passed: bool,
    },
    /// A lease was dropped.
    Release {
        lease: LeaseId,
        /// Whether the device is past the last use of the lease and its memory is unbacked. If
        /// `false`, `FencePassed` must follow.
        passed: bool,
    },
    /// The device is past the last use of this lease, or of the tail of a shrinking lease, and
    /// that memory is unbacked.
    FencePassed { lease: LeaseId },
    /// This generation of an actor and all earlier generations are dead. Their leases are revoked,
    /// and their waiting requests are refused. Each lease is freed after its fence. `OwnerCleared`
    /// follows once all leases are freed.
    OwnerDied { owner: Owner },
    /// The sender of a request no longer wants the answer. The ledger refuses the request if
    /// it is still waiting.
    Withdraw { id: RequestId },
    /// The bytes that other processes hold now. While any gate is open (a model is being profiled),
    /// a decrease is ignored.
    Foreign(Bytes),
    /// The owner of an elastic lease reports how far the lease can shrink. Orders to shrink respect
    /// this floor. The default is 0, and unknown leases are ignored.
    Floor {
        lease: LeaseId,
        /// The smallest size to which the lease can shrink.
        to: Bytes,
    },
    /// Repeats the orders to shrink while there is a deficit or part of the canary is missing. This
    /// reaches owners that started after the first order, and owners whose order was lost with an
    /// actor that died.
    Remind {
        /// Additional bytes to free beyond the bytes owed, because another
        /// process keeps taking memory.
        ahead: Bytes,
    },
    /// The bytes that this process holds outside leases now.
    Overhead(Bytes),
    /// The new configured size of the canary: the number of bytes to keep free.
    Canary(Bytes),
    /// Moves a model's gate, when the model becomes READY or stops.
    Gate { model: Label, to: Gate },
}
