//! Hooks for tests: what only actors of this crate ask the budget otherwise.

use bursar_budgets::{Bytes, Gate, GateError, Label, Lease, Owner, Request, Snapshot};

use crate::{
    budget::{Budget, LeaseError},
    responder::AskError,
    tree::Question,
};

/// A lease of any class. With `wait` it waits until there is memory for it.
///
/// # Errors
/// [`LeaseError`].
pub async fn lease(budget: &Budget, question: Question, request: Request, wait: bool) -> Result<Lease, LeaseError> {
    budget.ask(question, request, wait).await
}

/// Resizes a lease.
///
/// # Errors
/// [`LeaseError`].
pub async fn resize(budget: &Budget, question: Question, lease: &Lease, to: Bytes) -> Result<(), LeaseError> {
    budget.resize(question, lease, to).await
}

/// Takes back everything that `owner` holds, as after its death, and waits until all of it is back.
///
/// # Errors
/// The budget actor did not answer.
pub async fn clear(budget: &Budget, owner: Owner) -> Result<(), AskError> {
    budget.clear(owner).await
}

/// Moves a model's gate.
///
/// # Errors
/// The budget actor did not answer. The inner error means that the gate cannot move there.
pub async fn move_gate(budget: &Budget, model: Label, to: Gate) -> Result<Result<(), GateError>, AskError> {
    budget.move_gate(model, to).await
}

/// The ledger after an attempt at sizing was refused memory.
///
/// # Errors
/// The budget actor did not answer.
pub async fn evidence(budget: &Budget) -> Result<Snapshot, AskError> {
    budget.evidence().await
}
