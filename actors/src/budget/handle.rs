//! The way to the budget: clonable, and good across restarts of the actor.

use std::sync::Arc;

use bursar_budgets::{
    Bytes, Class, Gate, GateError, Hint, Label, Lease, Owner, Refusal, Request, RequestId, Resized, Snapshot,
};
use thiserror::Error;

use super::{BudgetMailbox, BudgetMessage, Elastic, mailbox::Note};
use crate::{
    event::{Event, EventLog},
    responder::{AskError, Responder},
    tree::{self, Question},
};

/// Asks the budget actor of one device.
///
/// ```
/// use bursar_actors::runtime::{DeviceChoice, Runtime, RuntimeConfig};
/// use bursar_budgets::{Bytes, Class, MIB};
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(512)), ..RuntimeConfig::default() };
/// let runtime = Runtime::start(config).await?;
/// let lease = runtime.budget().lease(Class::tenant("my-index"), 64 * MIB).await?;
/// assert_eq!(runtime.budget().snapshot().await?.granted, Bytes::mib(64));
///
/// let error = runtime.budget().try_lease(Class::tenant("my-index"), 480 * MIB).await.expect_err("32 MiB are kept free");
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

/// A lease that was not had.
#[derive(Debug, Error)]
pub enum LeaseError {
    /// The ledger refused it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A class that only models hold.
    #[error("leases of class {class} belong to models")]
    NotATenant {
        /// Which.
        class: Class,
    },
    /// The budget actor did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
}

impl LeaseError {
    /// Whether this says nothing about what was asked for, but that the runtime, the model or the asker has ended. The
    /// budget may know of it before they do.
    pub(crate) fn is_the_end(&self) -> bool {
        matches!(
            self,
            LeaseError::Unanswered(AskError::Gone { .. })
                | LeaseError::Refused(Refusal::GateClosed { gate: Gate::Teardown, .. } | Refusal::OwnerDead { .. })
        )
    }

    /// What to change.
    pub fn hint(&self) -> String {
        match self {
            LeaseError::Refused(refusal) => refusal.hint().unwrap_or_else(|| "ask again later".to_owned()),
            LeaseError::NotATenant { .. } => "ask for Class::tenant(\"a name of yours\")".to_owned(),
            LeaseError::Unanswered(AskError::TimedOut { .. }) => {
                "nobody gave back enough in time; ask for less, or when others have ended".to_owned()
            }
            LeaseError::Unanswered(AskError::Gone { .. }) => "the runtime is gone; start another".to_owned(),
        }
    }
}

/// The label of leases that belong to no model.
pub(crate) const NO_MODEL: &str = "user";

impl Budget {
    /// A handle to the actor that reads `mailbox`, now or later.
    pub fn at(mailbox: Arc<BudgetMailbox>) -> Self {
        Budget { mailbox }
    }

    /// A lease for your own code: `bytes` of a [`Class::tenant`]. Waits until others give back what is missing; models
    /// give back when they are unloaded. Dropping the future withdraws the question, dropping the lease gives the bytes
    /// back.
    ///
    /// # Errors
    /// [`LeaseError::Refused`] at once if the device is too small for it, or too many wait already;
    /// [`LeaseError::NotATenant`] for a class of a model's own.
    pub async fn lease(&self, class: Class, bytes: impl Into<Bytes>) -> Result<Lease, LeaseError> {
        self.tenant_lease(class, bytes.into(), true).await
    }

    /// As [`lease`](Budget::lease), but refused at once, by how much, if there is no room now.
    ///
    /// # Errors
    /// As [`lease`](Budget::lease).
    pub async fn try_lease(&self, class: Class, bytes: impl Into<Bytes>) -> Result<Lease, LeaseError> {
        self.tenant_lease(class, bytes.into(), false).await
    }

    async fn tenant_lease(&self, class: Class, bytes: Bytes, wait: bool) -> Result<Lease, LeaseError> {
        if !matches!(class, Class::Tenant(_)) {
            return Err(LeaseError::NotATenant { class });
        }
        let owner = Owner::new(class.label(), 0);
        self.ask(tree::LEASE_FOR_USER, Request::new(owner, class, NO_MODEL, bytes), wait).await
    }

    /// Every byte, by class, owner and model.
    ///
    /// # Errors
    /// If the budget actor does not answer.
    pub async fn snapshot(&self) -> Result<Snapshot, AskError> {
        self.snapshot_as(tree::SNAPSHOT_FOR_USER).await
    }

    /// The same as one of our actors asks it.
    pub(crate) async fn snapshot_as(&self, question: Question) -> Result<Snapshot, AskError> {
        self.put(question, |_, reply| BudgetMessage::Snapshot(reply)).await
    }

    /// As [`snapshot`](Budget::snapshot), after a look at what the driver says is free: what other processes hold is right
    /// for this moment. While a model starts less than before is ignored, as they may take it again.
    ///
    /// # Errors
    /// If the budget actor does not answer.
    pub async fn measure(&self) -> Result<Snapshot, AskError> {
        self.put(tree::MEASURE_FOR_USER, |_, reply| BudgetMessage::Measure(reply)).await
    }

    /// Something has happened to a model or its memory.
    pub(crate) fn tell(&self, event: Event) {
        self.events().tell(event);
    }

    /// What has happened on this device.
    pub(crate) fn events(&self) -> &EventLog {
        self.mailbox.events()
    }

    /// What live leases hold, without asking: a view for metrics, a moment old.
    pub fn leased_bytes(&self) -> Bytes {
        self.mailbox.leases().iter().map(|entry| entry.value().bytes).sum()
    }

    /// A lease for one of our own actors, of any class. With `wait` until others give back, else refused at once.
    ///
    /// # Errors
    /// [`LeaseError::Refused`], or [`LeaseError::Unanswered`] after the question's deadline.
    pub async fn ask(&self, question: Question, request: Request, wait: bool) -> Result<Lease, LeaseError> {
        let lease = self.put(question, |pending, reply| BudgetMessage::Ask {
            id: pending.open(),
            request: request.clone(),
            wait,
            reply,
        });
        Ok(lease.await??)
    }

    /// Another size for a lease; more of it is refused at once if there is no room. To shrink, shrink its segment first.
    ///
    /// # Errors
    /// As [`ask`](Budget::ask); the lease then has its size.
    pub async fn resize(&self, question: Question, lease: &Lease, to: Bytes) -> Result<(), LeaseError> {
        let id = lease.id();
        let resized = self.put(question, |pending, reply| BudgetMessage::Resize {
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

    /// Says that the lease can become smaller and larger from now on, and who hears of it. Orders come for as long as the
    /// lease lives, whichever budget actor gives them; one that stands already comes at once.
    pub fn obey(&self, lease: &Lease, elastic: Elastic) {
        self.mailbox.put(Note::Obeys(lease.id(), elastic));
    }

    /// Takes back everything a dead owner held; returns when all of it is home.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub async fn clear(&self, owner: Owner) -> Result<(), AskError> {
        self.put(tree::CLEAR_OWNER, |_, reply| BudgetMessage::OwnerDied { owner: owner.clone(), reply }).await
    }

    /// Moves a model's gate: open while it starts, frozen from READY on, in teardown while it ends.
    ///
    /// # Errors
    /// The budget actor did not answer; or, in its answer, the gate does not move there.
    pub async fn move_gate(&self, model: Label, to: Gate) -> Result<Result<(), GateError>, AskError> {
        self.put(tree::MOVE_GATE, |_, reply| BudgetMessage::Gate { model: model.clone(), to, reply }).await
    }

    /// Bytes that a new lease of device memory could have now.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub async fn available(&self) -> Result<Bytes, AskError> {
        self.put(tree::ROOM_FOR_PROFILE, |_, reply| BudgetMessage::Available { is_leased: false, reply }).await
    }

    /// The same, of a model that is sized and has leased all that it has taken: what came beside that, as kernels that
    /// libraries load when they are first used, is overhead from now on.
    pub(crate) async fn room(&self) -> Result<Bytes, AskError> {
        self.put(tree::ROOM_FOR_PROFILE, |_, reply| BudgetMessage::Available { is_leased: true, reply }).await
    }

    /// The ledger when an attempt at sizing was refused memory, after a look at what others hold.
    ///
    /// # Errors
    /// The budget actor did not answer.
    pub async fn evidence(&self) -> Result<Snapshot, AskError> {
        self.put(tree::EVIDENCE_FOR_PROFILE, |_, reply| BudgetMessage::Measure(reply)).await
    }

    /// Asks the actor that reads the mailbox. One that dies with the question has done nothing that its successor would
    /// not find: it is asked again, until the deadline.
    async fn put<T>(
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

/// A question that is withdrawn if its asker goes before the answer.
struct Pending<'d> {
    mailbox: &'d BudgetMailbox,
    id: RequestId,
    open: bool,
}

impl Pending<'_> {
    /// The question has a number of its own each time it is asked.
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
