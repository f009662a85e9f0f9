//! The handle to the budget. It can be cloned and stays valid across restarts of the actor.

use std::sync::Arc;

use bursar_budgets::{
    Bytes, Class, Gate, GateError, Hint, Label, Lease, Owner, Refusal, Request, RequestId, Resized, Snapshot,
};
use thiserror::Error;

use super::{BudgetMailbox, BudgetMessage, Elastic, Lendable, SharedKvDemand, mailbox::Note};
use crate::{
    event::{Event, EventLog},
    metric::DeviceLabel,
    responder::{AskError, Responder},
    tree::{self, Question},
};

/// A handle to the budget of one device, which leases memory and reports who holds it.
///
/// ```
/// use bursar_actors::runtime::{DeviceChoice, Runtime, RuntimeConfig};
/// use bursar_budgets::{Bytes, Class, Hint, MIB};
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(512)), ..RuntimeConfig::default() };
/// let runtime = Runtime::start(config).await?;
/// let lease = runtime.budget().lease(Class::external("my-index"), 64 * MIB).await?;
/// assert_eq!(runtime.budget().snapshot().await?.granted, Bytes::mib(64));
///
/// let error = runtime.budget().try_lease(Class::external("my-index"), 480 * MIB).await.expect_err("32 MiB are kept free");
/// println!("{error}\nhint: {}", error.hint());
/// drop(lease); // gives its bytes back
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Budget {
    mailbox: Arc<BudgetMailbox>,
}

#[derive(Debug, Error)]
pub enum LeaseError {
    /// The ledger refused the request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("leases of class {class} are reserved for models")]
    NotExternal { class: Class },
    /// The budget actor did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
}

impl LeaseError {
    /// Returns `true` if the error only means that the runtime, the model or the caller has ended.
    /// The budget may detect such an end before the caller does.
    pub(crate) fn is_shutdown(&self) -> bool {
        matches!(
            self,
            LeaseError::Unanswered(AskError::Gone { .. })
                | LeaseError::Refused(Refusal::GateClosed { gate: Gate::Teardown, .. } | Refusal::OwnerDead { .. })
        )
    }
}

impl Hint for LeaseError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            LeaseError::Refused(refusal) => refusal.hint().unwrap_or_else(|| "ask again later".to_owned()),
            LeaseError::NotExternal { .. } => "use Class::external(\"your own name\") instead".to_owned(),
            LeaseError::Unanswered(AskError::TimedOut { .. }) => {
                "ask for less, or ask again after other leases end: too little memory was returned in time".to_owned()
            }
            LeaseError::Unanswered(AskError::Gone { .. }) => "start another runtime: this one has ended".to_owned(),
        }
    }
}

/// The label of leases that belong to no model.
pub(crate) const NO_MODEL: &str = "user";

impl Budget {
    /// Creates a handle to the actor that reads `mailbox`. That actor may start later.
    pub(crate) fn at(mailbox: Arc<BudgetMailbox>) -> Self {
        Budget { mailbox }
    }

    /// Leases `bytes` for your own code, as a [`Class::external`]. Waits until enough memory is
    /// returned. Idle models give up KV cache memory for the request, and models return all their
    /// memory when they are unloaded. Dropping the future withdraws the request. Dropping the lease
    /// returns its bytes.
    ///
    /// # Errors
    /// [`LeaseError::Refused`] at once if the device is too small, or too many requests wait
    /// already. [`LeaseError::NotExternal`] for a class reserved for models.
    /// [`LeaseError::Unanswered`] after an hour, or if the runtime has ended.
    pub async fn lease(&self, class: Class, bytes: impl Into<Bytes>) -> Result<Lease, LeaseError> {
        self.tenant_lease(class, bytes.into(), true).await
    }

    /// Like [`lease`](Budget::lease), but the request is refused at once if too little memory is
    /// free. The error contains the number of missing bytes.
    ///
    /// # Errors
    /// The errors of [`lease`](Budget::lease).
    pub async fn try_lease(&self, class: Class, bytes: impl Into<Bytes>) -> Result<Lease, LeaseError> {
        self.tenant_lease(class, bytes.into(), false).await
    }

    async fn tenant_lease(&self, class: Class, bytes: Bytes, wait: bool) -> Result<Lease, LeaseError> {
        if !matches!(class, Class::External(_)) {
            return Err(LeaseError::NotExternal { class });
        }
        let owner = Owner::new(class.label(), 0);
        self.ask(tree::LEASE_FOR_USER, Request::new(owner, class, NO_MODEL, bytes), wait).await
    }

    /// Returns a snapshot of the ledger: every byte by class, owner and model.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub async fn snapshot(&self) -> Result<Snapshot, AskError> {
        self.snapshot_as(tree::SNAPSHOT_FOR_USER).await
    }

    /// Like [`snapshot`](Budget::snapshot), for actors of this crate. `question` sets the deadline.
    pub(crate) async fn snapshot_as(&self, question: Question) -> Result<Snapshot, AskError> {
        self.request(question, |_, reply| BudgetMessage::Snapshot(reply)).await
    }

    /// Like [`snapshot`](Budget::snapshot), after a new measurement of the driver's free bytes, so
    /// that the bytes of other processes are current. While a model starts, a decrease of their
    /// memory is ignored, because they may take it again.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub async fn measure(&self) -> Result<Snapshot, AskError> {
        self.request(tree::MEASURE_FOR_USER, |_, reply| BudgetMessage::Measure(reply)).await
    }

    /// Records an event of a model or its memory.
    pub(crate) fn record(&self, event: Event) {
        self.events().record(event);
    }

    /// The GPU of a group that has the least memory left after overhead and other processes. `None`
    /// if all GPUs have the same amount.
    pub(crate) fn fullest_gpu(&self) -> Option<DeviceLabel> {
        self.mailbox.fullest_gpu()
    }

    pub(crate) fn events(&self) -> &EventLog {
        self.mailbox.events()
    }

    /// Returns the bytes of live leases without asking the actor. The value may lag slightly, which
    /// is good enough for metrics.
    pub fn leased_bytes(&self) -> Bytes {
        self.mailbox.leases().iter().map(|entry| entry.value().bytes).sum()
    }

    /// Returns the bytes that models would give up for a waiting lease (ADR 5), without asking the
    /// actor.
    pub(crate) fn reclaimable_bytes(&self) -> Bytes {
        self.mailbox.lendable().iter().map(Lendable::would_give).sum()
    }

    /// Leases memory of any class for an actor of this crate. If `wait` is `true`, the request
    /// waits until enough memory is returned. Otherwise the request is refused at once if too
    /// little memory is free.
    ///
    /// # Errors
    /// [`LeaseError::Refused`], or [`LeaseError::Unanswered`] after the question's deadline.
    pub(crate) async fn ask(&self, question: Question, request: Request, wait: bool) -> Result<Lease, LeaseError> {
        let lease = self.request(question, |pending, reply| BudgetMessage::Ask {
            id: pending.open(),
            request: request.clone(),
            wait,
            reply,
        });
        Ok(lease.await??)
    }

    /// Resizes a lease. Growth is refused at once if too little memory is free. Before a lease
    /// shrinks, its segment must have shrunk.
    ///
    /// # Errors
    /// The errors of [`ask`](Budget::ask). The lease then keeps its size.
    pub(crate) async fn resize(&self, question: Question, lease: &Lease, to: Bytes) -> Result<(), LeaseError> {
        let id = lease.id();
        let resized = self.request(question, |pending, reply| BudgetMessage::Resize {
            id: pending.open(),
            lease: id,
            to,
            wait: false,
            reply,
        });
        let resized: Resized = resized.await??;
        lease.resize(&resized);
        Ok(())
    }

    /// Declares that the lease can shrink and grow from now on. The callback `elastic.orders`
    /// receives orders until the lease ends, including orders from restarted budget actors. An
    /// order that is already due arrives at once.
    pub(crate) fn accept_resize_orders(&self, lease: &Lease, elastic: Elastic) {
        self.mailbox.put(Note::AcceptsResizeOrders(lease.id(), elastic));
    }

    /// Creates the record of a model's demand for KV cache memory. Each rise of the demand notifies
    /// the budget, which may then lend memory.
    pub(crate) fn kv_demand(&self) -> SharedKvDemand {
        let mailbox = self.mailbox.clone();
        SharedKvDemand::new(move || mailbox.put(Note::KvDemand))
    }

    /// Revokes everything that a dead owner and its earlier generations held, and waits until all
    /// of it is returned.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub(crate) async fn clear(&self, owner: Owner) -> Result<(), AskError> {
        self.request(tree::CLEAR_OWNER, |_, reply| BudgetMessage::OwnerDied { owner: owner.clone(), reply }).await
    }

    /// Moves a model's gate: open while the model starts, frozen from READY on, teardown while it
    /// ends.
    ///
    /// # Errors
    /// The budget actor did not answer. The inner error means that this transition is not allowed.
    pub(crate) async fn move_gate(&self, model: Label, to: Gate) -> Result<Result<(), GateError>, AskError> {
        self.request(tree::MOVE_GATE, |_, reply| BudgetMessage::Gate { model: model.clone(), to, reply }).await
    }

    /// Returns the bytes of device memory that a new lease could get now.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub async fn available(&self) -> Result<Bytes, AskError> {
        self.request(tree::AVAILABLE_FOR_PROFILE, |_, reply| BudgetMessage::Available { is_leased: false, reply }).await
    }

    /// Like [`available`](Budget::available), for a model that is being sized and has leased all
    /// memory that it allocated. Other new memory of this process, such as library kernels loaded
    /// at their first use, counts as overhead from now on.
    pub(crate) async fn available_while_sizing(&self) -> Result<Bytes, AskError> {
        self.request(tree::AVAILABLE_FOR_PROFILE, |_, reply| BudgetMessage::Available { is_leased: true, reply }).await
    }

    /// Like [`measure`](Budget::measure), for an attempt at sizing that was refused memory.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub(crate) async fn measure_after_refusal(&self) -> Result<Snapshot, AskError> {
        self.request(tree::MEASURE_FOR_PROFILE, |_, reply| BudgetMessage::Measure(reply)).await
    }

    /// Asks the actor that reads the mailbox. If that actor dies before it answers, the question is
    /// sent to its successor, until the deadline. Sending a question twice is safe, because a
    /// successor rebuilds its state from everything that the dead actor has done.
    async fn request<T>(
        &self,
        question: Question,
        mut message: impl FnMut(&mut Pending<'_>, Responder<T>) -> BudgetMessage,
    ) -> Result<T, AskError> {
        let mut pending = Pending { mailbox: &self.mailbox, id: RequestId(0), open: false };
        let asking = async {
            let mut dead = None;
            loop {
                let actor = self.mailbox.actor_after(dead).await.ok_or(question.gone())?;
                let (reply, answer) = Responder::new();
                if actor.send_message(message(&mut pending, reply)).is_ok()
                    && let Ok(answer) = answer.await
                {
                    pending.open = false;
                    return Ok(answer);
                }
                dead = Some(actor.get_id());
            }
        };
        match tokio::time::timeout(question.deadline, asking).await {
            Ok(outcome) => outcome,
            Err(_) => Err(question.timed_out()),
        }
    }
}

/// A request that is withdrawn if its future is dropped before the answer.
struct Pending<'d> {
    mailbox: &'d BudgetMailbox,
    id: RequestId,
    open: bool,
}

impl Pending<'_> {
    /// Assigns a new number to the request. Called each time before the request is sent.
    fn open(&mut self) -> RequestId {
        (self.id, self.open) = (self.mailbox.next_request(), true);
        self.id
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let (true, Some(actor)) = (self.open, self.mailbox.actor()) {
            drop(actor.send_message(BudgetMessage::Withdraw(self.id)));
        }
    }
}

#[cfg(test)]
mod tests;
