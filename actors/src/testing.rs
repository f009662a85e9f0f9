//! Hooks for tests: requests to the budget that otherwise only actors of this crate make.

use bursar_budgets::{Bytes, Gate, GateError, Label, Lease, Owner, Request, Snapshot};

use crate::{
    budget::{Budget, LeaseError},
    responder::AskError,
    tree::Question,
};

/// Requests a lease of any class. With `wait`, the request waits until enough memory is free.
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

/// Takes back all bytes that `owner` holds, as after its death, and waits until
/// they have been returned.
///
/// # Errors
/// The budget actor did not answer.
pub async fn clear(budget: &Budget, owner: Owner) -> Result<(), AskError> {
    budget.clear(owner).await
}

/// Moves the gate of a model to another state.
///
/// # Errors
/// The budget actor did not answer. The inner error means that the gate cannot move to that state.
pub async fn move_gate(budget: &Budget, model: Label, to: Gate) -> Result<Result<(), GateError>, AskError> {
    budget.move_gate(model, to).await
}

/// The state of the ledger after an attempt at sizing was refused memory, as the attempt records
/// it.
///
/// # Errors
/// The budget actor did not answer.
pub async fn evidence(budget: &Budget) -> Result<Snapshot, AskError> {
    budget.measure_after_refusal().await
}
