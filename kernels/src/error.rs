//! What can go wrong in an operation.

use bursar_budgets::{DeviceError, WorkspaceFull};
use thiserror::Error;

use crate::{DType, Shape};

/// A failed operation. The tensors it would have written hold nothing of meaning.
#[derive(Debug, Error)]
pub enum KernelError {
    /// Two shapes that must agree do not.
    #[error("{op}: {what} is {found}, expected {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// What its shape should have been.
        expected: String,
        /// What it is.
        found: Shape,
    },
    /// An operand of a type that the operation does not take.
    #[error("{op}: {what} holds {found}, expected {expected}")]
    Type {
        /// The operation.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// What it should hold.
        expected: &'static str,
        /// What it holds.
        found: DType,
    },
    /// The workspace is smaller than the pass needs: it was planned for another envelope or another target.
    #[error(transparent)]
    Workspace(#[from] WorkspaceFull),
    /// The device refused or is lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
